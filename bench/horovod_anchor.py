"""Published scaling of Horovod, recomputed from the time of a step, the bytes of gradients and the simulated network.

Anchor: A. Sergeev, M. Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", arXiv:1802.05799,
section 5 and Horovod's docs/benchmarks: servers with 4 Pascal GPUs and a RoCE-capable 25 Gbit/s network,
tf_cnn_benchmarks, batch 64 per GPU. 512 GPUs: 90 % (Inception V3, ResNet-101), 68 % (VGG-16); 128 GPUs: 90, 90, 79 %.

The model of a step: forward takes a third of the step, backward two thirds (each multiplication of the forward pass has
two in the backward pass). Gradients become ready from the last layer to the first; every 5 ms a cycle of Horovod fuses
those that are ready, up to 64 MB (its defaults then: HOROVOD_CYCLE_TIME, HOROVOD_FUSION_THRESHOLD), and reduces them
with NCCL's ring over all GPUs, one fused buffer after the other. The step ends when the last is reduced.

What the model leaves out is what its predictions are too high by: every rank computes equally fast, and no cycle of the
coordinator is late. So it gives 10.5 % too much for ResNet-101 on 128 GPUs, and 15 % for VGG-16 on 512: there the bytes
that cross a link are those of 128 GPUs, where it is within 1 %, but the published efficiency falls from 79 to 68 %.
"""

from typing import Any

from dcoll import _C

BATCH = 64
CYCLE_US = 5000.0
FUSION_BYTES = 64 << 20
BACKWARD_SHARE = 2 / 3
MB = 1e6

# 25 Gbit/s in RoCE v2 packets of 1,024 bytes (the path MTU on Ethernet with 1,500): 82 bytes around each (preamble and
# gap 20, Ethernet 18, IP 20, UDP 8, BTH 12, ICRC 4).
GBIT = 25.0
PACKET_SHARE = 1024 / (1024 + 82)
NETWORK_US_PER_BYTE = 8e-3 / (GBIT * PACKET_SHARE)
# Latency of a hop of NCCL 2's ring through a proxy thread and staging in host memory, and between GPUs over PCIe 3
# x16 (12 GB/s of its 15.75 are usual). Orders of magnitude; doubled or halved, they move the
# efficiency by at most 3 points (Inception V3 on 512 GPUs, whose buffers are the smallest), most by less than 1.
NETWORK_ALPHA_US, NETWORK_OVERHEAD_US = 5.0, 1.0
PCIE = (2.0, 1.0, 1e-3 / 12, 0.0)
GPU_REDUCE_US_PER_BYTE = 3 / 500e3  # reads two, writes one, at some 500 GB/s of a P100's 732

# Layers from the last to the first: (parameters, multiplications) of VGG-16, configuration D (Simonyan, Zisserman 2015,
# table 1; 224 x 224 pixels). Backward time is shared out by multiplications.
VGG16_FULL = ((4096, 1000), (4096, 4096), (25088, 4096))
VGG16_CONVOLUTIONS = (
    (512, 512, 14), (512, 512, 14), (512, 512, 14), (512, 512, 28), (512, 512, 28), (256, 512, 28), (256, 256, 56),
    (256, 256, 56), (128, 256, 56), (128, 128, 112), (64, 128, 112), (64, 64, 224), (3, 64, 224),
)  # fmt: skip


def vgg16() -> list[tuple[float, float]]:
    full = [(a * b + b, a * b) for a, b in VGG16_FULL]
    convolutions = [(9 * a * b + b, 9 * a * b * side * side) for a, b, side in VGG16_CONVOLUTIONS]
    return [(float(parameters), float(work)) for parameters, work in full + convolutions]


def evenly(parameters: float, layers: int) -> list[tuple[float, float]]:
    return [(parameters / layers, 1.0)] * layers


# Images per second of one GPU, batch 64, synthetic data: TensorFlow's performance guide of 2017 (docs_src/performance/
# benchmarks.md, DGX-1, Tesla P100) for Inception V3 and VGG-16. It has no ResNet-101; Horovod's docs/benchmarks give
# 1,656.82 images per second on 16 GPUs of such servers, so one GPU does no less than a 16th of it.
# Parameters: Inception V3 23.8 million (Szegedy et al. 2015), ResNet-101 44.5 million (He et al. 2015); their layers
# are many and small, so gradients are spread evenly over backward.
MODELS: dict[str, tuple[float, list[tuple[float, float]]]] = {
    "Inception V3": (142.0, evenly(23.8e6, 94)),
    "ResNet-101": (1656.82 / 16, evenly(44.5e6, 101)),
    "VGG-16": (154.0, vgg16()),
}
ANCHORS: dict[str, dict[str, Any]] = {
    "horovod-512": {"servers": 128, "published": {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}},
    "horovod-128": {"servers": 32, "published": {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.79}},
}
GPUS_PER_SERVER = 4


def all_reduce_us(nbytes: float, servers: int) -> float:
    found = _C.plan.simulate(
        "all_reduce", "ring", bytes=round(nbytes), nodes=servers, ranks_per_node=GPUS_PER_SERVER,
        memory=PCIE, network=(NETWORK_ALPHA_US, NETWORK_OVERHEAD_US, NETWORK_US_PER_BYTE, 0.0),
        gamma_us_per_byte=GPU_REDUCE_US_PER_BYTE,
    )  # fmt: skip
    return float(found["us"])


def ready_times(layers: list[tuple[float, float]], step_us: float) -> list[tuple[float, float]]:
    """(when, bytes) of every layer's gradient."""
    backward = BACKWARD_SHARE * step_us
    work = sum(share for _, share in layers)
    found, now = [], step_us - backward
    for parameters, share in layers:
        now += backward * share / work
        found.append((now, 4 * parameters))
    return found


def step_with_reduction_us(layers: list[tuple[float, float]], step_us: float, servers: int) -> tuple[float, int]:
    """When the last fused buffer is reduced, and how many there are."""
    waiting = ready_times(layers, step_us)
    now, buffers = 0.0, 0
    while waiting:
        # The next cycle at which something is ready and the last buffer is through.
        start = max(now, waiting[0][0])
        start = -(-start // CYCLE_US) * CYCLE_US
        fused = 0.0
        while waiting and waiting[0][0] <= start and (fused == 0 or fused + waiting[0][1] <= FUSION_BYTES):
            fused += waiting.pop(0)[1]
        now = start + all_reduce_us(fused, servers)
        buffers += 1
    return max(now, step_us), buffers


def reproduce(name: str) -> dict[str, Any]:
    anchor = ANCHORS[name]
    rows = []
    for model, (images_per_second, layers) in MODELS.items():
        step_us = BATCH / images_per_second * 1e6
        total_us, buffers = step_with_reduction_us(layers, step_us, anchor["servers"])
        nbytes = 4 * sum(parameters for parameters, _ in layers)
        published = anchor["published"][model]
        predicted = step_us / total_us
        rows.append({
            "model": model,
            "gradient_bytes": nbytes,
            "step_ms": step_us / 1e3,
            "all_reduce_ms": all_reduce_us(nbytes, anchor["servers"]) / 1e3,
            "exposed_ms": (total_us - step_us) / 1e3,
            "fused_buffers": buffers,
            "published": published,
            "predicted": predicted,
            "off": predicted / published - 1,
        })  # fmt: skip
    gpus = anchor["servers"] * GPUS_PER_SERVER
    return {"name": name, "title": f"Horovod, {gpus} Pascal GPUs, 25 GbE RoCE", "rows": rows}


def table(anchor: dict[str, Any]) -> str:
    lines = [
        f"# {anchor['title']}",
        f"{'model':>14s}{'MB':>8s}{'step ms':>10s}{'ring ms':>10s}{'exposed':>10s}{'buffers':>9s}"
        f"{'predicted':>11s}{'published':>11s}{'off':>8s}",
    ]
    for row in anchor["rows"]:
        lines.append(
            f"{row['model']:>14s}{row['gradient_bytes'] / MB:>8.0f}{row['step_ms']:>10.1f}{row['all_reduce_ms']:>10.1f}"
            f"{row['exposed_ms']:>10.1f}{row['fused_buffers']:>9d}{100 * row['predicted']:>10.1f}%"
            f"{100 * row['published']:>10.1f}%{100 * row['off']:>+7.1f}%"
        )
    return "\n".join(lines)
