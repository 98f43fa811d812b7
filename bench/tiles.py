"""Search the tiles for `kernels.choose_tile` of the engine: every convolution of ResNet-18 with many tiles, on a GPU.

    python bench/tiles.py            (a few minutes, mostly compilation on all cores)

The program prints the best five tiles of each product. Times under 0.06 ms measure the launch, not the kernel.
"""

import itertools
import multiprocessing

import torch

from stableair.engine import kernels
from stableair.engine.kernels import Activation, Moments
from stableair.engine.launch import Tile

CLIENTS, BATCH = 50, 10
LAYERS = [  # side of the input, channels, outputs, kernel, stride, padding
    (32, 3, 64, 3, 1, 1),
    (32, 64, 64, 3, 1, 1),
    (32, 64, 128, 3, 2, 1),
    (32, 64, 128, 1, 2, 0),
    (16, 128, 128, 3, 1, 1),
    (16, 128, 256, 3, 2, 1),
    (16, 128, 256, 1, 2, 0),
    (8, 256, 256, 3, 1, 1),
    (8, 256, 512, 3, 2, 1),
    (8, 256, 512, 1, 2, 0),
    (4, 512, 512, 3, 1, 1),
]
KINDS = "forward", "input", "weight"
SIDES = list(itertools.product((64, 128, 256), (64, 128, 256)))
PIPELINES = [(32, 4, 5), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 3)]  # depth, warps, stages
TILES = [Tile(rows, columns, *pipeline) for rows, columns in SIDES for pipeline in PIPELINES]


def product(kind, layer, clients):
    """Return one product of a layer as a function of its tile."""
    side, c, o, k, stride, pad = layer
    out = (side + 2 * pad - k) // stride + 1

    def random(*shape):
        return torch.randn(clients, *shape, device="cuda").bfloat16()

    x, dy, w = random(BATCH, side, side, c), random(BATCH, out, out, o), random(o, k, k, c)
    samples = torch.full((clients,), BATCH, dtype=torch.int32, device="cuda")
    moments, master = Moments(*torch.rand(4, clients, c, device="cuda")), w.float()
    return {
        "forward": lambda tile: kernels.conv_forward(x, w, samples, stride, pad, tile),
        "input": lambda tile: kernels.conv_input_grad(
            dy, w, (side, side), stride, pad, None, Activation([(x, moments)]), tile
        ),
        "weight": lambda tile: kernels.conv_weight_grad_sgd(dy, x, master, w, 1e-6, stride, pad, tile),
    }[kind]


def try_compile(job):
    """Compile a product in a worker process, which fills the cache on disk; False if the device cannot run it."""
    kind, layer, tile = job
    try:
        product(kind, layer, 1)(tile)
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def milliseconds(work, times=5):
    """Return the mean time of a call, after a warm-up call."""
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


if __name__ == "__main__":
    jobs = [
        (kind, layer, tile) for kind in KINDS for layer in LAYERS for tile in TILES if layer[1] > 3 or kind != "input"
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        usable = [job for job, good in zip(jobs, pool.map(try_compile, jobs, chunksize=4), strict=True) if good]
    for (kind, layer), group in itertools.groupby(usable, key=lambda job: job[:2]):
        work = product(kind, layer, CLIENTS)
        ranked = sorted((milliseconds(lambda tile=tile, work=work: work(tile)), tile) for *_, tile in group)
        print(kind, layer, *(f"{ms:.3f} ms {tuple(tile)}" for ms, tile in ranked[:5]), sep="  ", flush=True)
