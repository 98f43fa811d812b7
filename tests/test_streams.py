from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stableair.errors import InputError
from stableair.streams import Generator, first_bits, generator, open_unit, uniform

WORD = st.integers(0, 2**64 - 1)


def test_without_a_second_key_it_is_splitmix64():
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821
    ]  # fmt: skip
    assert [b % 2**64 for b in Generator((1234567, 0)).bits(5).tolist()] == published


@given(key=st.tuples(WORD, WORD), position=st.integers(0, 2**40))
def test_bits_match_the_hash_in_plain_integers(key, position):
    mask = 2**64 - 1
    z = (key[0] + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z ^= key[1]
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    source = Generator(key)
    source.position = position
    assert source.bits(1).item() % 2**64 == z ^ (z >> 31)


def test_numbers_depend_on_the_position_and_not_on_the_calls():
    split, whole = generator(1, "a", 2), generator(1, "a", 2)
    assert torch.equal(torch.cat([split.uniform(3), split.uniform(4)]), whole.uniform(7))
    assert torch.equal(generator(1, "n").normal(10)[:4], generator(1, "n").normal(4))


def test_several_generators_at_once_give_the_values_of_each():
    sources = [generator(seed, "a") for seed in range(3)]
    assert torch.equal(first_bits(sources, 7), torch.stack([source.bits(7) for source in sources]))


def test_any_part_of_the_name_makes_another_stream():
    names = [
        (0, "a", 1),
        (1, "a", 1),
        (0, "b", 1),
        (0, "a", 2),
        (0, "a", 1, 0),
        (0, "a", 11),
        (0, "a1", 1),
        (-1, "a", 1),
    ]
    assert len({tuple(generator(*name).bits(2).tolist()) for name in names}) == len(names)


def test_equal_integers_of_any_type_name_the_same_stream():
    same = generator(np.int64(3), "a", torch.tensor(2), np.int32(1))
    assert torch.equal(same.bits(2), generator(3, "a", 2, 1).bits(2))


def test_the_interval_is_open_at_both_ends():
    lowest, highest = open_unit(torch.tensor([0, -1])).tolist()
    assert lowest == 2.0**-53
    assert highest == 1 - 2.0**-53


def test_draws_are_uniform_or_normal_and_streams_are_independent():
    rows = torch.stack([generator(0, "noise", k).uniform(20_000) for k in range(10)])
    assert stats.kstest(rows.flatten().numpy(), "uniform").pvalue > 1e-3
    correlation = torch.corrcoef(rows) - torch.eye(10)
    assert correlation.abs().max() < 5 / 20_000**0.5
    assert abs(torch.corrcoef(torch.stack([rows[0][:-1], rows[0][1:]]))[0, 1]) < 5 / 20_000**0.5
    assert stats.kstest(generator(0, "normal").normal(200_000).numpy(), "norm").pvalue > 1e-3


def test_streams_whose_counters_overlap_still_differ():
    gamma = 0x9E3779B97F4A7C15
    ahead, behind = Generator((5 + 3 * gamma, 77)), Generator((5, 78))
    assert not set(ahead.bits(1000).tolist()) & set(behind.bits(1000).tolist())


def test_all_permutations_are_equally_likely():
    assert sorted(generator(3, "p").permutation(1000).tolist()) == list(range(1000))
    source = generator(4, "p")
    seen = [tuple(source.permutation(4).tolist()) for _ in range(12_000)]
    counts = [seen.count(p) for p in permutations(range(4))]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_torch_generator_is_supported():
    u = uniform((100_000,), torch.Generator().manual_seed(0), "cpu")
    assert u.dtype == torch.float64
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(u, uniform((100_000,), torch.Generator().manual_seed(0), "cpu"))


def test_the_numpy_generator_is_a_function_of_the_stream():
    assert (
        generator(0, "a").numpy().random() == generator(0, "a").numpy().random() != generator(1, "a").numpy().random()
    )


@pytest.mark.gpu
def test_the_bits_are_the_same_on_a_gpu(cuda):
    on_cpu, on_gpu = generator(0, "noise", 3), generator(0, "noise", 3, device=cuda)
    assert torch.equal(on_cpu.bits(1_000_003), on_gpu.bits(1_000_003).cpu())
    assert torch.equal(on_cpu.permutation(1000), on_gpu.permutation(1000).cpu())
    assert torch.equal(on_cpu.uniform(1000), on_gpu.uniform(1000).cpu())


def test_a_stream_has_a_round_and_can_be_moved_to_another_round():
    source = generator(4, "noise", 7, 3)
    source.uniform(5)  # the position does not matter
    assert source.round == 7
    assert torch.equal(source.at(2).uniform(6), generator(4, "noise", 2, 3).uniform(6))
    assert source.at(2).at(7).key == source.key
    assert source.ahead(3).round == 7
    with pytest.raises(InputError) as error:
        _ = generator(4, "init").round
    assert error.value.code == "unnamed-generator"


def test_a_substream_is_independent_of_its_stream():
    source = generator(4, "participation", 7, 3)
    first = source.substream("dropout").uniform(6)
    source.uniform(5)  # draws from the stream do not advance the substream
    assert torch.equal(source.substream("dropout").uniform(6), first)
    assert source.substream("dropout").round == 7
    others = [source.substream("other"), source.at(6).substream("dropout"), source.at(7)]
    assert all(not torch.equal(other.uniform(6), first) for other in others)
