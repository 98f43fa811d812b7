"""A plain PyTorch loop, as in most research code: one client after the other, with one optimiser per client."""

import copy
import time

import torch
from torch.nn import functional as F
from work import network, print_result, read

work = read()
torch.set_num_threads(1)  # more threads are slower for such a small network
server, seconds = network(work), []
for _ in range(work.rounds + 1):
    begin = time.perf_counter()
    total = [torch.zeros_like(p) for p in server.parameters()]
    for part in work.parts:
        client = copy.deepcopy(server)
        optimiser = torch.optim.SGD(client.parameters(), lr=work.lr)
        for _ in range(work.epochs):
            for batch in part[torch.randperm(len(part))].split(work.batch):
                optimiser.zero_grad()
                F.cross_entropy(client(work.x[batch]), work.y[batch]).backward()
                optimiser.step()
        for t, p in zip(total, client.parameters(), strict=True):
            t += p.detach() / len(work.parts)
    with torch.no_grad():
        for p, t in zip(server.parameters(), total, strict=True):
            p.copy_(t)
    seconds.append(time.perf_counter() - begin)
print_result(seconds, server, work)
