"""The benchmark's arguments, its exact inputs and results, and its table. One process, no collectives."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import arguments
import calls
import gpu_collectives
import kernels
import media
import models
import network
import optimizer
import overlap
import table
import torch_backend
import verify


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("8", 8), ("64K", 65536), ("64k", 65536), ("128M", 128 << 20), ("2G", 2 << 30)]
)
def test_sizes_have_units_of_1024(text, nbytes):
    assert arguments.parse_size(text) == nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 3 << 10, 5 << 20, 1 << 30])
def test_format_size_is_the_inverse_of_parse_size(nbytes):
    assert arguments.parse_size(arguments.format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-b", "12X"], ["'12X' is not a size", "64K"]),
        (["-e", "-1"], ["'-1' is not a size"]),
        (["-b", ""], ["'' is not a size"]),
        (["-t", "float8"], ["'float8' is not a data type", "bfloat16", "half"]),
        (["-f", "1"], ["'1' is not valid", "greater than 1"]),
        (["-f", "nan"], ["'nan' is not valid"]),
        (["-n", "-5"], ["'-5' is not valid", "at least 0"]),
        (["-n", "many"], ["'many' is not valid", "at least 0"]),
        (["-o", "xor"], ["sum", "avg", "min", "max", "prod"]),
        (["-c", "2"], ["0, 1"]),
        (["--mapped", "2"], ["both"]),
        (["--peer", "nccl"], ["mpi4py", "gloo"]),
        (["-f", "2", "-i", "8"], ["-f and -i were both given"]),
        (["-i", "0"], ["at least 1 byte"]),
        (["-b", "2K", "-e", "1K"], ["-b 2K is more than -e 1K"]),
        (["--peer", "mpi4py", "-t", "half"], ["mpi4py has no float16", "float32"]),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(argv, said, capsys):
    with pytest.raises(SystemExit) as error:
        arguments.parse(argv)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert [part for part in said if part not in message] == []


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        (["-b", "8", "-e", "64"], [8, 16, 32, 64]),
        (["-b", "8", "-e", "100", "-f", "3"], [8, 24, 72]),
        (["-b", "4", "-e", "16", "-i", "4"], [4, 8, 12, 16]),
        (["-b", "4", "-e", "16", "-i", "4", "-t", "double"], [0, 8, 16]),  # whole elements only
        (["-b", "0", "-e", "16"], [0, 4, 8, 16]),
        (["-b", "10", "-e", "10", "-t", "int32"], [8]),
        (["-b", "1", "-e", "4", "-f", "1.5", "-t", "int8"], [1, 2, 3]),
    ],
)
def test_message_sizes(argv, sizes):
    assert arguments.message_sizes(arguments.parse(argv)) == sizes


@pytest.mark.parametrize("parse", [network.parse, media.parse, torch_backend.parse_arguments])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-b", "0"], "-b 0 is less than one float32: allowed is at least 4"),
        (["-f", "1"], "'1' is not valid: allowed is a number greater than 1"),
        (["-b", "2K", "-e", "1K"], "-b 2K is more than -e 1K"),
    ],
)
def test_sizes_that_would_have_no_end_are_refused(parse, argv, said, capsys):
    with pytest.raises(SystemExit):
        parse(argv)
    assert said in capsys.readouterr().err
    assert arguments.message_sizes(parse(["-b", "4", "-e", "100", "-f", "2.5"])) == [4, 8, 24, 60]


@pytest.mark.parametrize(
    ("parse", "argv", "said"),
    [
        (optimizer.parse_arguments, ["--turns", "0"], "at least 1"),
        (optimizer.parse_arguments, ["--steps", "0"], "at least 1"),
        (torch_backend.parse_arguments, ["--turns", "0"], "at least 1"),
        (torch_backend.parse_arguments, ["--width", "100"], "a multiple of 6"),
        (kernels.parse, ["--seconds", "0"], "greater than 0"),
        (kernels.parse, ["--seconds", "nan"], "greater than 0"),
        (kernels.parse, ["-p", "0"], "at least 1"),
        (kernels.parse, ["-b", "64K", "0"], "-b 0: allowed are multiples of 4"),
        (kernels.parse, ["-t", "int8", "float64", "-b", "1004"], "-b 1004: allowed are multiples of 8"),
        (gpu_collectives.parse, ["-b", "0"], "-b 0 is less than one float32"),
    ],
)
def test_bounds(parse, argv, said, capsys):
    with pytest.raises(SystemExit):
        parse(argv)
    assert said in capsys.readouterr().err


def test_what_a_script_calls_is_timed_beside_peers():
    called = [arguments.parse(argv).call for argv in ([], ["--peer", "gloo"], ["--peer", "gloo", "--call", "core"])]
    assert called == ["core", "python", "core"]


def test_ranks_limit_what_sums_can_be_checked():
    limits = [verify.max_ranks(op, torch.int8) for op in arguments.OPS]
    assert limits == [42, 42, math.inf, math.inf, math.inf]


def test_defaults_are_those_of_nccl_tests():
    args = arguments.parse([])
    assert (args.minbytes, args.maxbytes, args.stepfactor, args.warmup_iters) == (8, 128 << 20, 2.0, 5)
    assert (args.datatype, args.op, args.check, args.mapped, args.peer) == ("float32", "sum", 1, "both", [])


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in arguments.DTYPE_BYTES], ids=str)
@pytest.mark.parametrize("op", arguments.OPS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_patterns_are_reduced_exactly(dtype, op, size):
    """What verify.py computes in 64-bit integers is what torch computes in the type itself, rank after rank."""
    patterns = [verify.Pattern(dtype, op, rank, size) for rank in range(size)]
    count = verify.BLOCK + verify.PERIOD // 2
    tensors = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    for pattern, tensor in zip(patterns, tensors, strict=True):
        pattern.fill(tensor)
        assert pattern.count_changed_inputs(tensor) == 0
    combine = {"min": torch.minimum, "max": torch.maximum, "prod": torch.mul}.get(op, torch.add)
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result = combine(result, tensor)
    if op == "avg":
        if dtype.is_floating_point:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            result = (result.to(wide) * torch.tensor(1 / size, dtype=wide)).to(dtype)
        else:
            result = torch.div(result, size, rounding_mode="trunc")
    assert [pattern.count_wrong_results(result) for pattern in patterns] == [0] * size
    result[count - 1] += 1
    result[0] += 1
    assert [pattern.count_wrong_results(result) for pattern in patterns] == [2] * size


@pytest.mark.parametrize("op", arguments.OPS)
def test_patterns_show_chunks_that_are_swapped_and_ranks_that_are_missing(op):
    size = 4
    pattern = verify.Pattern(torch.float32, op, 1, size)
    chunk = 4096
    swapped = pattern.result.clone()
    swapped[:chunk], swapped[chunk : 2 * chunk] = pattern.result[chunk : 2 * chunk], pattern.result[:chunk]
    assert pattern.count_wrong_results(swapped) > chunk // 4
    others = [verify.contribution(op, rank, size) for rank in range(size)]
    assert all(not torch.equal(a, b) for i, a in enumerate(others) for b in others[:i])


def test_table_lines_up_and_counts_wrong_elements():
    args = arguments.parse(["--peer", "gloo"])
    part = {"time_us": 12.5, "algbw": 1.0, "busbw": 1.0, "wrong": 3}
    row = {"size": 1024, "count": 256, "memory": "plain", "out_of_place": part, "in_place": part | {"wrong": None}}
    row["gloo"] = part | {"ratio": 4.0}
    names, units = table.head(args).splitlines()[1:]
    assert len(names) == len(table.line(row, args))
    assert names.endswith("gloo    ratio")
    assert units.count("(us)") == 3
    assert table.count_wrong([row, row]) == 6
    assert "6 FAILED" in table.footer([row, row], args)
    assert "geometric mean : 4.00" in table.footer([row], args)


@pytest.mark.parametrize("parse", [calls.parse_arguments, optimizer.parse_arguments, overlap.parse, arguments.parse])
def test_the_benchmarks_have_a_help(parse, capsys):
    with pytest.raises(SystemExit) as error:
        parse(["--help"])
    assert error.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


def test_arguments_of_calls(capsys):
    assert calls.parse_arguments([]).only == ["inline", "async", "grouped"]
    assert calls.parse_arguments(["--only", "async", "--only", "inline"]).only == ["async", "inline"]
    with pytest.raises(SystemExit):
        calls.parse_arguments(["--help"])
    assert "may be repeated (default: all three)" in " ".join(capsys.readouterr().out.split())
    for wrong in (["--turns", "0"], ["--ms", "0"], ["--only", "all"]):
        with pytest.raises(SystemExit):
            calls.parse_arguments(wrong)
        assert "allowed are" in capsys.readouterr().err or wrong[0] == "--only"


def test_overlap_gives_what_follows_the_dashes_to_the_training():
    args = overlap.parse(["--model", "eighty", "--steps", "20", "--", "--batch", "4"])
    assert (args.model, args.steps, args.training) == ("eighty", 20, ["--batch", "4"])
    assert overlap.parse([]).model == "gpt"


@pytest.mark.parametrize(("name", "parameters", "elements"), [("small", 1000, 32_000), ("eighty", 80, 2_631_680)])
def test_models_of_the_benchmarks_are_what_they_are_called(name, parameters, elements):
    model = models.MODELS[name]()
    found = list(model.parameters())
    assert (len(found), sum(p.numel() for p in found)) == (parameters, elements)
    model(models.MODELS[name].input(4)).backward()
    assert all(p.grad is not None for p in found)
