"""What travels between nodes is compressed: over pretended nodes, MPI alone, and one node where it is forced."""

import re

import checks_auto_compression
import checks_compression
import checks_residuals
import checks_schedules
import checks_top_k
import pytest
from mpirun import expect, launch, names_of_checks, run_checks

pytestmark = pytest.mark.mpi

FORCED = ("DCOLL_COMPRESS_LOCAL", "1")  # Toy's buckets are small
JOBS = [
    (2, (FORCED,)),
    (2, (FORCED, ("DCOLL_TRANSPORT", "mpi"))),
    (3, (FORCED, ("DCOLL_NODES", "0,1,1"))),
    (4, (FORCED, ("DCOLL_NODES", "0,0,1,1"))),
]


MODULES = (checks_compression, checks_top_k, checks_residuals, checks_schedules)


@pytest.mark.parametrize(("module", "check"), [(m.__name__, check) for m in MODULES for check in names_of_checks(m)])
@pytest.mark.parametrize(("n", "settings"), JOBS, ids=str)
def test_compression(n: int, settings: tuple[tuple[str, str], ...], module: str, check: str) -> None:
    expect(run_checks(module, n, settings), check)


UNFORCED = [
    (2, (("DCOLL_NODES", "0,1"), ("DCOLL_LOG_LEVEL", "info"))),
    (4, (("DCOLL_NODES", "0,0,1,1"),)),
    (3, (("DCOLL_NODES", "0,1,2"), ("DCOLL_CALIBRATE", "off"))),
]


@pytest.mark.parametrize("check", names_of_checks(checks_auto_compression))
@pytest.mark.parametrize(("n", "settings"), [*JOBS[1:], *UNFORCED], ids=str)
def test_auto(n: int, settings: tuple[tuple[str, str], ...], check: str) -> None:
    expect(run_checks("checks_auto_compression", n, settings), check)


def test_auto_says_on_rank_0_what_it_has_chosen() -> None:
    said = re.findall(
        r"\[dcoll (\w+) rank (\d).*\] all-reduces of float32 of up to (.*)",
        run_checks("checks_auto_compression", *UNFORCED[0]).stderr,
    )
    chosen = r"(?:8192|2048) KiB go (?:as .*|in full): [\d.]+ ms (\w+) as .*, [\d.]+ ms in full \(link .*\)"
    how = {found[1] for _, _, text in said if (found := re.fullmatch(chosen, text))}
    assert how == {"predicted", "measured"}, said  # check_calls_that_are_close_... has timed some
    assert {(level, rank) for level, rank, _ in said} == {("notice", "0")}


def test_saturation_is_told() -> None:
    assert "float16 has no room for " in run_checks("checks_compression", *JOBS[0]).stderr


ONE_NODE = """
import sys, torch, dcoll
dcoll.init()
Compression = dcoll.Compression
asked = eval(sys.argv[1])
x = torch.full((40000,), 1e6)

def reduce():
    for one in (x, x[:9]):
        assert torch.equal(dcoll.allreduce(one, compression=asked), one)
        assert torch.equal(dcoll.allreduce(one, compression=asked, name="named"), one)

def step():
    params = [torch.nn.Parameter(torch.zeros(100, 50)) for _ in range(2)]
    optimizer = dcoll.DistributedOptimizer(torch.optim.SGD(params[:1], lr=1.0), compression=asked)
    for added in (params[1:], []):
        sum(p.sum() for p in params).backward()
        optimizer.step()
        for p in params:
            p.grad = None
        if added:
            optimizer.add_param_group({"params": added})
    assert torch.equal(params[1].detach(), torch.full((100, 50), -1.0))

globals()[sys.argv[2]]()
"""


@pytest.mark.parametrize(
    ("asked", "does", "lines"),
    [
        ("Compression.fp16", "reduce", 1),
        ("Compression.int8", "step", 1),
        ("Compression.topk(0.1)", "step", 1),
        ("Compression.fp16", "step", 1),
        ("Compression.auto('bf16')", "step", 1),
        ("Compression.powersgd(1)", "step", 1),
        ("Compression.auto", "step", 0),
        ("Compression.none", "step", 0),
    ],
)
def test_one_node_says_once_that_it_compresses_nothing(asked: str, does: str, lines: int) -> None:
    done = launch(2, "-c", ONE_NODE, asked, does, preloaded=True)
    assert done.returncode == 0, done.text
    assert len(re.findall(r"\[dcoll warning rank 0.*nothing is compressed inside one node", done.stderr)) == lines
    assert done.stderr.count("[dcoll") == lines, done.text
