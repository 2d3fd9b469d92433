"""What compression costs and saves, bucket by bucket."""

from typing import Any

from dcoll.job.process_sets import ProcessSet, communicator_of, global_process_set


def stats(process_set: ProcessSet = global_process_set) -> dict[str, dict[str, Any]]:
    """What this rank's encoded all-reduces have cost since init(), by the name of the bucket or the operation.

    Of those by a codec of the core (Compression.fp16, bf16, int8, topk) that were encoded: none on one node. Each has

        codec             "fp16", "bf16", "int8", or "topk" and the share that was sent last
        calls             how often
        elements          float32 that this rank has encoded
        plain_bytes       what it would have sent of them as they are, in a ring
        wire_bytes        what it has sent
        saturated         values that float16 had no room for
        encode_seconds    of this rank's core
        decode_seconds    ... and of adding up
        wire_seconds      all other time until the result was there: messages, waits, and other ranks of the node
        residual_norm     of an optimizer's bucket: the length of what is kept for later steps, in units of gradients

    Call it between steps. Raises ArgumentError for a process set that this rank is not in, DcollError before init().

        for name, cost in dcoll.stats().items():
            print(f"{name}: {cost['plain_bytes'] / cost['wire_bytes']:.1f} times less sent")
    """
    found: dict[str, dict[str, Any]] = communicator_of(process_set).encoded_costs()
    if found:
        from dcoll.compression import residuals  # which needs torch, as an optimizer does

        for name, norm in residuals.norms().items():
            if name in found:
                found[name]["residual_norm"] = norm
    return found
