"""DistributedOptimizer in training steps that torch.compile was given as a whole."""

import pytest
from mpirun import launch

pytestmark = pytest.mark.mpi

SCRIPT = """
import sys
import torch
import dcoll as hvd
from torch import nn

hvd.init()
parts, compiled_autograd = sys.argv[1], sys.argv[2] == "1"
torch._dynamo.config.compiled_autograd = compiled_autograd
torch.manual_seed(0)
model, reference = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40), nn.Linear(40, 40)) for _ in range(2))
reference.load_state_dict(model.state_dict())
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
plain = torch.optim.Adam(reference.parameters(), lr=0.1)

def step(x):
    if parts == "all":
        optimizer.zero_grad()
    model(x).pow(2).sum().backward()
    if parts == "all":
        optimizer.step()

step = torch.compile(step, backend="aot_eager")
for i in range(4):
    batches = torch.randn(hvd.size(), 2, 4, generator=torch.Generator().manual_seed(i))
    if parts == "backward":
        optimizer.zero_grad()
    step(batches[hvd.rank()])
    if parts == "backward":
        optimizer.step()
    plain.zero_grad()
    (sum(reference(x).pow(2).sum() for x in batches) / hvd.size()).backward()
    plain.step()
for p, q in zip(model.parameters(), reference.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
print("the same")
"""


@pytest.mark.parametrize(("parts", "compiled_autograd"), [("all", "0"), ("backward", "0"), ("backward", "1")])
def test_compiled_steps(parts: str, compiled_autograd: str) -> None:
    done = launch(2, "-c", SCRIPT, parts, compiled_autograd, preloaded=True)
    assert done.returncode == 0, done.text
    assert done.stdout.count("the same") == 2
    assert "does not know how to trace" not in done.stderr
