"""Train unmodified Flower clients over a noisy channel, with the MAC receiver and without repair."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits

from stableair.flower import OverTheAir

x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x, net, client, server = x.float() / 16, torch.nn.Linear(64, 10), ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    mine = slice(context.node_config["partition-id"], 1400, context.node_config["num-partitions"])
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine])
        net.zero_grad()
        loss.backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y[mine])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    for receiver in ("mac(C=auto)", "none()"):
        air = OverTheAir(FedAvg(fraction_evaluate=0.0), noise="sas(alpha=1.2, tau=0.2)", receiver=receiver, lr=0.1)
        start = ArrayRecord(torch.nn.Linear(64, 10).state_dict())
        net.load_state_dict(air.start(grid, start, num_rounds=20).arrays.to_torch_state_dict())
        print(f"{receiver:12} {(net(x[1400:]).argmax(1) == y[1400:]).float().mean():.3f}")


run_simulation(server, client, num_supernodes=10)
