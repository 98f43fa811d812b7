"""One spec for every registered component. The contract tests run over these, so a new component needs a line here."""

EXAMPLES = {
    "receivers": [
        "mac(C=1)",
        "clip(C=1)",
        "gnc(max_norm=1)",
        "none()",
        "cauchy(K=1)",
        "blank(C=1)",
        "sign(step=1)",
        "quantile_clip(q=0.9)",
        "tanh_clip(C=1)",
    ],
    "noises": [
        "sas(alpha=1.5, tau=0.1)",
        "gaussian(std=2)",
        "student_t(df=3)",
        "middleton(A=0.1, gamma=0.1)",
        "none()",
    ],
    "fadings": ["rayleigh(mean=1)", "rician(K=2)", "nakagami(m=2)", "unit()"],
    "partitions": [
        "iid()",
        "dirichlet(beta=0.3)",
        "dirichlet_by_class(beta=0.3)",
        "shards(k=2)",
        "by_writer()",
        "flwr(IidPartitioner)",
    ],
    "models": ["logistic()", "mlp(width=4)", "cnn(width=8)", "resnet18()", "resnet34(norm=group)"],
    "data": [
        "digits()",
        "synthetic(samples=50)",
        "cifar10(train=30)",
        "cifar100()",
        "femnist(test=5)",
        "hf(name='someone/images', writer=who)",
    ],
    "servers": ["sgd()", "momentum()"],
    "participations": ["all()", "sample(m=2)", "bernoulli(q=0.5, expected=True)", "dropout(p=0.5, of='sample(m=3)')"],
    "powers": ["none()"],
    "channels": ["flat(noise_on=sum)"],
}
