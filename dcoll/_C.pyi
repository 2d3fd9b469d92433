"""The compiled core, as Python sees it.

Buffers cross this boundary as (address, element count, dtype code): the core knows neither torch nor NumPy. Callers
keep the memory alive until the handle is done. Every method that can wait releases the GIL.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, final

_P = ParamSpec("_P")

__version__: str
cuda_built: bool
"""True when the CUDA kernels were compiled in (nccl-style `cuda_built`)."""

class DcollError(RuntimeError): ...
class ArgumentError(DcollError, ValueError): ...
class MismatchError(DcollError): ...
class JoinedError(MismatchError): ...
class TimeoutError(DcollError): ...
class PeerError(DcollError): ...
class TransportError(DcollError): ...

# dtype codes (csrc/base/types.h)
FLOAT16: int
BFLOAT16: int
FLOAT32: int
FLOAT64: int
INT8: int
UINT8: int
INT32: int
INT64: int
BOOL: int
INT16: int
UINT16: int
UINT32: int
UINT64: int
# reduce op codes
AVERAGE: int
SUM: int
ADASUM: int
MIN: int
MAX: int
PRODUCT: int
BIT_AND: int
BIT_OR: int
BIT_XOR: int

def settings() -> list[tuple[str, str, str, str, str]]:
    """Every DCOLL_* setting: (name, default, allowed values, help, value in force now)."""

def horovod_settings() -> list[tuple[str, str, str]]:
    """Horovod's variables: name, the DCOLL_* setting it stands for or "", and then why none is needed."""

def start_timeline(comm: Communicator, path: str, mark_cycles: bool = False) -> None:
    """Begins a Chrome trace of this process; a path with {rank} on every rank, any other on rank 0 alone."""

def stop_timeline(comm: Communicator) -> None: ...

@final
class Buffer:
    """Memory owned by the core: supports the (writable) buffer protocol as flat bytes; freed when collected."""

    address: int
    nbytes: int
    mapped: bool
    """True when the node's other ranks have it mapped too."""
    def appear_at(self, address: int, nbytes: int) -> None:
        """Have the pages of mapped memory appear at that address too, in place of whole pages of another mapping, which
        is copied first and whose owner unmaps them. This object must live until then."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class DeviceBuffer:
    """Memory of a device that other processes can open. Its bytes are anything at first.

    A GPU's has __cuda_array_interface__, the emulated device's is a buffer."""

    def __init__(self, device: int, nbytes: int) -> None: ...
    def part(self, offset: int, nbytes: int) -> DeviceBuffer:
        """Some of the same memory."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

def show_device_memory(device: int) -> bytes:
    """What open_device_memory() takes in another process, while this one lives."""

def open_device_memory(device: int, shown: bytes) -> str:
    """Open that memory for a device, and read it, and say by what; raise what keeps this process from it."""

def hash_memory(blocks: Sequence[tuple[int, int]]) -> list[int]:
    """A 64-bit hash, as a signed number, of each (address, number of bytes)."""

@final
class Handle:
    def poll(self) -> bool:
        """True when finished, successfully or not. Never raises, never waits."""
    def released(self) -> bool:
        """True when finished and nothing reads or writes the caller's memory any more, as it may after a failure."""
    def wait(self, timeout: float = -1.0, spins: bool = True) -> None:
        """Wait until finished; raise what the collective failed with.

        spins: False for a thread beside the one that computes, on the same core: it looks briefly, then sleeps.

        timeout in seconds; negative: no limit beyond the core's own deadline (DCOLL_TIMEOUT). When it passes,
        TimeoutError is raised and the collective goes on: wait again.
        """
    def output(self) -> Buffer | None:
        """Ragged collectives (allgather, alltoall): the received bytes, in rank order; None: they are in the memory
        that the caller gave, whose size was right. After wait()."""
    def counts(self) -> list[int]:
        """Ragged collectives: rows received from each rank. After wait()."""
    source: int
    """Of a receive: the rank in this communicator that sent the message."""

class _Starts:
    """What starts collectives, in a Communicator and in its `by_name`."""

    rank: int
    size: int
    # Pointers are addresses; count is in elements. in_ptr == out_ptr is in place. `name` is for messages and
    # part of what ranks compare; "" is fine. So are dims, of the tensor, and row_dims, of what follows its first.
    def allreduce(
        self,
        in_ptr: int,
        out_ptr: int,
        count: int,
        dtype: int,
        op: int,
        name: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
        algo: str = "",
        dims: Sequence[int] = (),
        codec: str = "",
        group: str = "",
    ) -> Handle:
        """group: what is in the operand, if that is several tensors; ranks compare it as they do the name."""
    def adasum(
        self,
        in_ptr: int,
        out_ptr: int,
        elements: Sequence[int],
        dtype: int,
        name: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        """allreduce with op ADASUM of several tensors that lie one behind the other, each with factors of its own."""
    def broadcast(
        self, ptr: int, nbytes: int, root: int, dtype: int, name: str = "", dims: Sequence[int] = ()
    ) -> Handle: ...
    def allgather(
        self,
        in_ptr: int,
        rows: int,
        row_bytes: int,
        dtype: int,
        name: str = "",
        out_ptr: int = 0,
        out_bytes: int = 0,
        row_dims: Sequence[int] = (),
        group: str = "",
    ) -> Handle:
        """Each rank contributes `rows` rows (may differ) of row_bytes (must not); see Handle.output and counts.

        A result of exactly out_bytes goes to out_ptr, and there is no Handle.output."""
    def reducescatter(
        self,
        in_ptr: int,
        out_ptr: int,
        rows: int,
        row_elems: int,
        dtype: int,
        op: int,
        name: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
        row_dims: Sequence[int] = (),
    ) -> Handle:
        """rows of row_elems elements are reduced; each rank keeps rows // size, the first rows % size one more."""
    def alltoall(
        self,
        in_ptr: int,
        splits: Sequence[int],
        row_bytes: int,
        dtype: int,
        name: str = "",
        out_ptr: int = 0,
        out_bytes: int = 0,
        row_dims: Sequence[int] = (),
    ) -> Handle:
        """splits[d] consecutive rows go to rank d; see Handle.output and counts."""
    def barrier(self, name: str = "") -> Handle: ...

def _waited(start: Callable[_P, Handle]) -> Callable[_P, None]:
    """Of a collective's name_sync: what it takes, and returns."""

def _with_rows(start: Callable[_P, Handle]) -> Callable[_P, tuple[Buffer | None, list[int]]]:
    """The same of a ragged one: the output (None: it went to out_ptr) and the counts."""

@final
class Communicator(_Starts):
    """An ordered set of ranks. Collectives are matched by the order of calls, which must be the same on every rank."""

    local_rank: int
    local_size: int
    node: int
    encodes: bool
    """Whether float32 may be encoded among these ranks, if it is large enough: where messages carry it, and
    everywhere if DCOLL_COMPRESS_LOCAL says so."""
    joins: int
    """How many this rank has begun: between them the same number on all ranks."""
    def tell_uncompressed(self) -> None:
        """Compression was asked for: a line on standard error where there is none, once, on rank 0."""
    num_nodes: int
    nodes: list[int]
    """The node index of every rank."""
    transports: list[str]
    """The medium that reaches each rank: "self", "local", "shm", "mpi" or "ucx"."""
    job_ranks: list[int]
    """Of each rank, its number in the job: what messages call it."""

    def constants(self) -> dict[str, Any]:
        """The constants of the cost model in use, as plan.constants()."""
    def constants_source(self) -> str:
        """Where they are from: "built in", "measured in 61 ms", or a file."""
    def coding(self, codec: str) -> tuple[float, float] | None:
        """Microseconds to encode, and to decode, a byte of float32, as all ranks take it; None before an all-reduce
        with codec "auto ..." has measured it, of a selection up to twice as large."""
    def describe_path(self, collective: str, bytes: int, dtype: int, op: int, memory: str) -> str:
        """How such a call goes, for people. collective: as in plan.select(). memory: "ordinary" on all ranks, "mapped"
        or "device"."""

    # Each name_sync is name(...).wait(), on the calling thread when nothing is queued before it.
    allreduce_sync = _waited(_Starts.allreduce)
    broadcast_sync = _waited(_Starts.broadcast)
    allgather_sync = _with_rows(_Starts.allgather)
    reducescatter_sync = _waited(_Starts.reducescatter)
    alltoall_sync = _with_rows(_Starts.alltoall)
    barrier_sync = _waited(_Starts.barrier)
    def isend(self, address: int, nbytes: int, peer: int, tag: int = 0) -> Handle:
        """Start sending to a rank. Messages between two ranks with one tag meet receives in the order sent.

        A small one is done when it is copied, a large one when the receiver has read it. MismatchError, beginning
        nothing: a small one that was sent to this peer before met a receive of another length. The caller keeps the
        memory alive until the handle is done, here and below.
        """
    def irecv(self, address: int, nbytes: int, peer: int, tag: int = 0) -> Handle:
        """Start receiving from a rank, or with peer == -1 from any: Handle.source tells which. A message of another
        length is a MismatchError on both sides, and nothing is copied."""
    def alloc(self, nbytes: int) -> Buffer:
        """Zeroed memory that the node's other ranks have mapped (plain memory when there are none). 64-byte aligned."""
    def scratch(self, nbytes: int) -> Buffer:
        """The same out of a pool, to which it goes back: not zeroed, and at least so large."""
    @property
    def by_name(self) -> OnDevice:
        """Starts operations that meet those of equal kind and name on the other ranks, in whatever order each rank
        starts them."""
    def join(self, note: str = "") -> int:
        """Take part in the others' all-reduces with neutral elements until every rank has joined; the last one to join.

        `note` is logged when the others go on."""
    def fail(self, text: str) -> None:
        """Mark the communicator failed with this cause, and tell every peer. Idempotent."""
    def refuse(self, why: str) -> None:
        """Take the turn of this rank's next ordered call without making it, and return at once: what the other ranks
        call then fails there with a MismatchError that says why. Nothing happens if all ranks refuse."""
    def note_refused(self, why: str) -> None:
        """A call was refused here before the others heard of it. They hear why if they turn out to have made it."""
    def log(self, level: str, text: str) -> None:
        """A line on standard error, if DCOLL_LOG_LEVEL lets it through."""
    timeout_s: float
    """How long an operation may make no progress, in seconds: DCOLL_TIMEOUT, until it is set, alike on all ranks."""
    def failure(self) -> str:
        """The first cause this communicator failed with, or ""."""
    def encoded_costs(self) -> dict[str, dict[str, Any]]:
        """Of encoded all-reduces, by name: see dcoll.stats()."""
    def close(self) -> None:
        """Finish what is queued, say goodbye to the peers, stop. Idempotent. Calls after it raise DcollError."""
    def leave(self) -> None:
        """As close(), without waiting for the peers: close() once left(), or to wait for them after all."""
    def left(self) -> bool:
        """Whether all peers leave, too."""

EMULATED_DEVICE: int

@final
class OnDevice:
    """The collectives of a Communicator or of its by_name, and the Communicator's isend() and irecv(), on memory of a
    device: a GPU by its number, or EMULATED_DEVICE.

    They begin after what is in the thread's current stream, and the stream that is current in Handle.wait() waits for
    them. A device that fails raises DcollError on its rank and PeerError on the others."""

    rank: int
    size: int
    def __init__(self, comm: Communicator | OnDevice, device: int) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

def nccl_version() -> int:
    """As NCCL numbers them, 22703 for 2.27.3; 0: torch brings none, and DCOLL_NCCL names none."""

def place_emulated(place: str) -> None:
    """For tests: where the emulated device of this process is in its machine. Two at one place are one."""

def emulates_device() -> bool:
    """DCOLL_DEVICE=emulated: tensors of torch on the CPU are taken for tensors of EMULATED_DEVICE."""

def use_streams(current_stream: Callable[[int], int]) -> None:
    """current_stream: the address of the current stream of a GPU."""

def share_emulated(shares: bool) -> None:
    """Whether the emulated device shows its memory to other processes, and opens theirs."""

def let_emulated_compute(computes: bool) -> None:
    """Whether the emulated device has kernels."""

def fail_emulated_after(pieces: int) -> None:
    """Have the emulated device fail for good in the last of so many copies and kernels; negative: it works again."""

@final
class InlineCall:
    """A callable with the parameters of dcoll's collective of that name: "allreduce", "broadcast", "allgather",
    "reducescatter", "alltoall" or "barrier". It does the plain calls in C and hands all others on.

    otherwise: the Python function; ops: the members of dcoll.ReduceOp; communicator: None means the job's (set_job).
    An allreduce in place has no parameter `compression`; else it may be no_compression.
    wrap_rows(tensor, buffer, counts) makes a tensor of a result whose size was not guessed.
    handle: makes it asynchronous, without a parameter `compression`. It returns
    handle(core handle, operand or None, None, result); an allgather or alltoall is always handed on.
    grouped: it has the parameters of the collective of a group of tensors, and hands on every call.

    Where a call that was handed on fails before the other ranks hear of it, the communicator keeps the reason for them.
    """

    def __init__(
        self,
        otherwise: Callable[..., Any],
        collective: str,
        ops: tuple[int, ...],
        in_place: bool = False,
        communicator: Communicator | None = None,
        no_compression: Any = ...,
        wrap_rows: Callable[[Any, Buffer, list[int]], Any] = ...,
        handle: Callable[[Handle, Any, None, Any], Any] = ...,
        grouped: bool = False,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def all_reduce_plain(communicator: Communicator, tensor: Any, op: int, /) -> bool:
    """An all-reduce in place on the calling thread, of a dense torch.Tensor of the CPU (or a numpy.ndarray) of any
    dtype of dcoll's but bool, whose version for autograd stays; shapes may differ between ranks. op: an operator's
    code.

    False: it is another tensor, and nothing was done. A negated view is taken for what lies in its memory.
    """

def set_job(communicator: Communicator | None) -> None:
    """The communicator of dcoll's own InlineCalls; None: there is none, they hand every call on."""

def set_process_set(process_set: object, communicator: Communicator | None) -> None:
    """The communicator for InlineCall's argument process_set when it is this object; None: there is none."""

def use_torch(torch: Any, written: Callable[[tuple[Any, ...]], None], allow_exchange: bool = True) -> bool:
    """Let InlineCall work on torch's tensors. written: tells autograd that tensors were overwritten.

    True when they are read through DLPack's C exchange API; False when through torch's methods, because torch does not
    have it or allow_exchange is False.
    """

def use_numpy(numpy: Any) -> None:
    """Let InlineCall work on NumPy's arrays."""

class Bootstrap:
    """How the ranks of a job find each other, and what they have been told by whoever started them."""

    rank: int
    size: int
    library_version: str
    """Of what carries messages between nodes."""
    def subset(self, ranks: Sequence[int]) -> Bootstrap:
        """The same for these ranks alone, this one among them. Collective over them."""
    def finalize(self) -> None: ...
    def abort_after(self, seconds: float, exit_code: int, text: str = "") -> None:
        """End all ranks of the job then, whatever this process is doing; the earliest time counts.

        text: what to print before, of a normal end. Then ranks of this machine that compute are waited for longer
        while this one is in finalize(), and Python's own end is given another minute.
        """

@final
class Mpi(Bootstrap):
    """What load_mpi() found out about MPI."""

    library_path: str
    thread_level: int
    """0 single .. 3 multiple"""

def make_ender() -> None:
    """Make the thread that abort_after() tells, or say that the system gives none."""

def load_mpi(plugin_path: str) -> Mpi:
    """Load libdcoll_mpi.so, initialise MPI unless it is already. TimeoutError, PeerError: not all ranks came."""

def open_store(
    rank: int, size: int, set: Callable[[str, bytes], object], get: Callable[[str], bytes | None]
) -> Bootstrap:
    """A job whose ranks meet through a key-value store. get() does not wait: None where the key is not there yet."""

def connect_world(job: Bootstrap | None) -> Communicator:
    """The communicator of all ranks of the job; None: a communicator of this process alone."""

def connect_local(n: int) -> list[Communicator]:
    """n communicators of one world inside this process, one for each of n threads (tests)."""

def make_group(whole: Communicator, ranks: Sequence[int], job: Bootstrap | None) -> Communicator:
    """A communicator of some of another's ranks. Collective over them alone (csrc/engine/communicator/subset.h).

    ranks: this one among them, counted as they come. job: of the whole.
    """

@final
class GroupHandle:
    """A group of tensors that is reduced. In place, the tensors are written to by wait()."""

    def poll(self) -> bool: ...
    def released(self) -> bool: ...
    def wait(self, timeout: float = -1.0) -> None: ...

# tensors: torch.Tensor or numpy.ndarray, dense; None when one of them is not, and then nothing was done.
def grouped_allreduce_sync(
    comm: Communicator,
    tensors: list[Any],
    in_place: bool,
    op: int,
    name: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
    graded: bool = False,
    codec: str = "",
) -> list[Any] | None:
    """All tensors reduced as one; the results (in_place: the tensors, marked as written). graded: None, too, when a
    tensor requires a gradient."""

def grouped_allreduce(
    comm: Communicator | OnDevice,
    tensors: list[Any],
    in_place: bool,
    op: int,
    name: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
    codec: str = "",
) -> tuple[GroupHandle, list[Any]] | None:
    """The same, started; the tensors were copied already."""

@final
class RowGroupHandle:
    """A group of tensors that is gathered or scattered as one."""

    def poll(self) -> bool: ...
    def released(self) -> bool: ...
    def wait(self, timeout: float = -1.0) -> None: ...
    def rows(self) -> list[int]:
        """Once finished: how many rows the result of each tensor has."""
    def unpack(self, addresses: Sequence[int]) -> None:
        """Once finished: write the results there."""

def unpack_rows(
    group: RowGroupHandle, tensors: list[Any], makers: dict[type, Callable[[Any, tuple[int, ...]], Any]]
) -> list[Any] | None:
    """The results of a finished group in new tensors; None when they have to be unpacked by address.

    makers: of each type of tensor, what makes one of it and a shape.
    """

# tensors: dense torch.Tensor or numpy.ndarray with rows, or of each its address, shape, elements per row and
# dtype code; None when one of them is neither, and then nothing was done. They are copied already on return.
def grouped_allgather_sync(
    comm: Communicator, tensors: list[Any], name: str = "", graded: bool = False
) -> RowGroupHandle | None:
    """Each of the tensors gathered, by one operation, which is finished. Ranks may differ in the numbers of rows.

    graded: None, too, where one of them requires a gradient.
    """

def grouped_allgather(comm: Communicator | OnDevice, tensors: list[Any], name: str = "") -> RowGroupHandle | None:
    """The same, started."""

def grouped_reducescatter_sync(
    comm: Communicator,
    tensors: list[Any],
    op: int,
    name: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
    graded: bool = False,
) -> RowGroupHandle | None:
    """Each of the tensors reduced and its rows shared, by one operation per dtype, which are finished."""

def grouped_reducescatter(
    comm: Communicator | OnDevice,
    tensors: list[Any],
    op: int,
    name: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> RowGroupHandle | None:
    """The same, started."""

@final
class Reducer:
    """Fused gradient buckets (csrc/engine/buckets/bucket.h).

    Parameters are numbered 0..P-1 in the order given, the same on all ranks. Initially buckets are filled in reverse
    order (gradients become ready back to front); rebuild() re-fills them in the order observed on rank 0.
    """

    def __init__(
        self,
        comm: Communicator,
        numels: Sequence[int],
        dtypes: Sequence[int],
        names: Sequence[str],
        op: int,
        bucket_bytes: int,
        first_bucket_bytes: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_dtype: int | None = None,
        groups: Sequence[int] = (),
        label: str = "",
        codec: str = "",
        feedback: bool = True,
        momentum: float = 0.0,
        warmup_steps: int = 0,
        start_step: int = 0,
    ) -> None:
        """wire_dtype: FLOAT16 or BFLOAT16: what wider gradients are cast to while they are reduced; not float32 with a
        codec, which is what it is between nodes.

        codec: "fp16", "bf16", "int8", "topk 0.01" (the share that is sent), "fp32" or "" for none.
        feedback: what int8 and topk lose is added to the next step's gradients.
        momentum, warmup_steps, start_step: of topk.

        groups: of each parameter, the number of its group. A bucket is made of each group (and dtype) then.
        label: in the names of the buckets, which ranks compare: tells them from another Reducer's.
        """
    def rounds(self) -> int:
        """How many have ended, well or not: where its schedules of compression are."""
    def set_rounds(self, rounds: int) -> None:
        """The ranks agree on the most that any has in the Reducer's first round, and after join()."""
    def num_buckets(self) -> int: ...
    def bucket_params(self, bucket: int) -> list[int]: ...
    def bucket_name(self, bucket: int) -> str:
        """What its all-reduces are called."""
    def gradient(self, param: int) -> tuple[Buffer, int]:
        """Where the parameter's gradient lies: a buffer, and how many bytes behind its beginning."""
    def move(self, params: Sequence[int]) -> list[int]:
        """Between backwards: what these gradients lie in is somebody else's from now on.

        Returns the parameters whose gradients lie elsewhere now, these and perhaps others, with nothing in it.
        """
    def mark_ready(self, param: int, gradient_ptr: int = 0) -> bool:
        """The gradient is in the bucket. Submits every bucket that became full (in bucket order).

        gradient_ptr: if not 0, the gradient is there, in the parameter's order and dtype, and is copied first.

        Returns False when the parameter was ready already (a second backward before finish()): nothing is done then.
        """
    def finish(self) -> list[int]:
        """End of backward: parameters not ready contribute zeros; submit the rest, wait for all buckets.

        Returns the parameters that no rank had a gradient for (their slots hold zeros): their .grad should stay None.
        Resets readiness for the next backward.
        """
    def kept(self, param: int) -> dict[str, Any]:
        """What encoding has lost of the parameter's gradient so far: flat float32 "error" and "velocity", if kept."""
    def keep(self, param: int, values: dict[str, Any]) -> None:
        """Replaces it."""
    def abandon(self) -> int:
        """In place of finish(): this rank cannot go on. Returns how many buckets the other ranks still submit.

        At least one, if there are any: the last one is submitted by finish().
        """
    def settle(self) -> None:
        """Before a round: wait for what the last one left in flight, when it was abandoned or interrupted."""
    def missing(self) -> list[int]:
        """Parameters not marked ready since the last finish()."""
    def order(self) -> list[int]:
        """Parameters in the order they became ready in the last finished backward (missing ones last)."""
    def rebuild(self, order: Sequence[int]) -> None:
        """Lay the buckets out anew in this order (the same on all ranks). Old buffers stay valid while referenced."""
    def wait_seconds(self) -> float:
        """Total time spent waiting in finish() so far: communication that backward did not hide."""

@final
class Rounds:
    """How many rounds of an optimizer's gradients have ended (csrc/engine/buckets/rounds.h); a Reducer has its own."""

    def __init__(self, comm: Communicator, name: str, scheduled: bool) -> None:
        """name: of agree(). scheduled: whether something goes by them; if nothing does, they never may_differ()."""
    def ended(self) -> int: ...
    def set_ended(self, rounds: int) -> None: ...
    def end_one(self) -> None: ...
    def may_differ(self) -> bool:
        """Between ranks, in the first round and after a join(): then agree() is its first call."""
    def agree(self) -> None:
        """On the most that any rank has. Where it fails, on all ranks alike, it was the only call of the round."""

@final
class HookState:
    """What the GradientHooks of one owner share."""

    def __init__(self) -> None: ...
    reducer: Reducer | None
    """None: every gradient goes through bring_in()."""
    task: int
    """The backward that runs, by autograd's number; -2 is none."""
    idle: bool
    """Gradients stay where they are: more backward passes follow."""
    sums_again: bool
    """Reducing a sum once more would be wrong: bring_in() decides."""

@final
class GradientHook:
    """A post-accumulate-grad hook (csrc/bind/gradient_hook.cc).

    Calls owner.begin_backward() when graph_task() is not state.task; does nothing more while state.idle; then brings
    the gradient into its bucket, makes views[index] the parameter's .grad and reports it to the Reducer, or has all
    this done by owner.bring_in(index) where it is not an ordinary dense tensor of the parameter's dtype and layout.
    """

    def __init__(
        self,
        owner: object,
        views: list[Any],
        graph_task: Callable[[], int],
        state: HookState,
        index: int,
        row_major: bool,
    ) -> None: ...
    def __call__(self, param: Any, /) -> None: ...

def take_gradients(hooks: list[GradientHook], params: list[Any]) -> None:
    """What the hooks of those parameters that have a gradient do, but for begin_backward()."""

def gradient_marks(params: list[Any]) -> int:
    """What differs when a .grad came, went or was written to by torch in between. 0: all are None."""

def kept_gradients(
    views: list[Any],
    params: list[Any],
    addresses: list[int],
    storages: list[int],
    usual: list[int],
    tensor_uses: Callable[[Any], int] | None,
    storage_uses: Callable[[int], int] | None,
) -> list[int]:
    """The numbers of the views that somebody has beside their list, and are not the .grad of their parameter; and of
    those that do not lie at their address any more.

    storages: what storage_uses takes; usual: what it returns of each while nobody has it.
    """

class _Kernels:
    """The CPU kernels (csrc/kernels), by address: for benchmarks and tests."""

    def active_isa(self) -> str: ...
    def set_isa(self, isa: str) -> bool:
        """Use "generic", "avx2", "avx512" or "avx512vnni" from now on. False, changing nothing, when this CPU or build
        lacks it."""
    def reduce2(self, dst: int, a: int, b: int, count: int, dtype: int, op: int, scale: float = 1.0) -> None: ...
    def reduce_n(self, dst: int, srcs: Sequence[int], count: int, dtype: int, op: int, scale: float = 1.0) -> None: ...
    def reduce_n_to_n(
        self, dsts: Sequence[int], srcs: Sequence[int], count: int, dtype: int, op: int, scale: float = 1.0
    ) -> None: ...
    def scale(self, dst: int, src: int, count: int, dtype: int, scale: float) -> None: ...
    def cast(self, dst: int, dst_dtype: int, src: int, src_dtype: int, count: int) -> None: ...
    def encoded_bytes(self, codec: str, count: int) -> int: ...
    def encode(self, codec: str, dst: int, src: int, count: int, error: int = 0, key: int | None = None) -> int:
        """float32 into "fp16", "bf16", "int8" or "fp32". Returns how many values float16 had no room for; error: 0, or
        float32 that is added first, and is what was lost afterwards; key: rounds at random, drawing from it."""
    def decode(self, codec: str, dst: int, src: int, count: int) -> None: ...
    def sum_encoded(
        self,
        codec: str,
        dst: int,
        srcs: Sequence[int],
        count: int,
        scale: float = 1.0,
        error: int = 0,
        key: int | None = None,
    ) -> int:
        """The encoded form of scale * (the sum of what srcs stand for); error: what encoding lost is added there."""
    def top_bytes(self, count: int, k: int) -> int: ...
    def encode_top(
        self, message: int, src: int, count: int, k: int, error: int = 0, velocity: int = 0, momentum: float = 0.0
    ) -> int:
        """The k greatest of float32, or of error + src, which stays in error but for what is sent (kernels/topk.h).
        Returns how many are sent."""
    def sum_top(self, dst: int, messages: Sequence[int], count: int, k: int, factor: float = 1.0) -> bool:
        """False: a message is damaged."""
    def add_and_project(
        self, p: int, matrix: int, source: int, error: int, q: int, rows: int, columns: int, rank: int
    ) -> None:
        """Of PowerSGD, in float32 (kernels/low_rank.h): matrix = source + error, unless that is 0; p = q matrix^T.
        source may be the matrix."""
    def orthonormalise(self, factors: Sequence[tuple[int, int, int]]) -> None:
        """The rows of each p become orthonormal, by Gram-Schmidt. factors: (p, rows, rank)."""
    def project_back(self, q: int, matrix: int, p: int, rows: int, columns: int, rank: int) -> None:
        """q = p matrix."""
    def split(self, matrix: int, error: int, p: int, q: int, sum: int, rows: int, columns: int, rank: int) -> None:
        """error = matrix - p^T q; matrix = p^T sum."""
    def pack(self, flat: int, segments: Sequence[tuple[int, int, int]]) -> None:
        """segments: (address, offset in bytes, bytes); address 0 packs zeros."""
    def unpack(self, segments: Sequence[tuple[int, int, int]], flat: int) -> None: ...

kernels: _Kernels  # a module

cuda: Any
"""The CUDA kernels, for benchmarks and tests: a module with those of `kernels` up to sum_top(), pack() and unpack().

They take addresses of the current device and, behind the others, a parameter `stream`, a cudaStream_t (0: the default
stream); help() lists all parameters. They return nothing: encode() and sum_encoded() add how many values float16 had no
room for to a uint64 at `beyond`, encode_top() writes how many are sent to a uint32 at `sent`, both unless 0; the uint32
at sum_top()'s `first_bad` becomes the number of the first damaged message, if that is less than what it is. `scratch`
is memory of as many bytes as encode_top_scratch(count, k) and sum_top_scratch(count, messages) say.

Beside them it has available(), unavailable_reason(), "" when it is, device_count(), device_name(device=0),
runtime_version(), 13000 for 13.0, and driver_version(), the newest that the driver can serve, 0 without one. A build
without CUDA has available, device_count and unavailable_reason only.
"""

class _Plan:
    """Schedules as data (csrc/plan): build, verify, select. Nothing here communicates."""

    def algorithms(self) -> list[tuple[str, str, str]]:
        """(collective, name, reason)"""
    def build(self, collective: str, algo: str, n: int, rank: int, root: int = 0) -> list[list[dict[str, Any]]]:
        """The channels of one rank, each a list of steps: op, src, src_chunk, dst, chunk, receives_from, sends_to (a
        rank or None), send_channel (the number its messages are posted on, or None), finalize, text.
        """
    def verify(
        self,
        collective: str,
        algo: str,
        n: int,
        slot_depth: int = 1,
        rounds: int = 2,
        in_place: bool = False,
        root: int = 0,
    ) -> str:
        """Empty when right, else what is wrong, naming rank, channel and step."""
    def select(
        self,
        collective: str,
        bytes: int,
        nodes: Sequence[int],
        slice_bytes: int = 61440,
        constants: dict[str, Any] = ...,
    ) -> dict[str, Any]:
        """name, reason, why, candidates: (name, predicted us, slice bytes, reason), fastest first. nodes: the node of
        each rank. constants: those that differ from the built-in ones, as constants() has them."""
    def hierarchical(
        self, bytes: int, nodes: Sequence[int], slice_bytes: int = 61440, constants: dict[str, Any] = ...
    ) -> dict[str, Any]:
        """The all-reduce on two levels: between (the algorithm between nodes; None: the operand rides on the
        agreement), agreement_us, in_node_us, between_us, total_us, and why, one line of these."""
    DEFAULT_SLICE_BYTES: int
    def encoded(
        self,
        codec: str,
        bytes: int,
        nodes: Sequence[int],
        encode_us_per_byte: float,
        decode_us_per_byte: float,
        slice_bytes: int = 61440,
        constants: dict[str, Any] = ...,
        two_levels: bool = False,
    ) -> dict[str, Any]:
        """plain_us, encoded_us, pays, close: an all-reduce of so much float32 as it is and encoded, and whether the two
        are so close that the first calls decide. two_levels: ranks of a node share memory."""
    def coding(self, codec: str) -> tuple[float, float]:
        """Microseconds to encode, and to decode, a byte of float32 on this core, measured now."""
    def constants(self) -> dict[str, Any]:
        """The built-in constants of the cost model: memory and network (dicts of alpha_us, overhead_us,
        beta_us_per_byte, fan_in, burst_bytes, transit_us_per_byte), gamma_us_per_byte, handshake_us (what a
        collective between nodes begins with; negative: follows from the links) and shared_cores (some ranks share
        a core)."""
    def simulate(self, collective: str, algo: str, *, bytes: int, nodes: int, **options: Any) -> dict[str, Any]:
        """us, method ("every rank" or "one group", csrc/plan/simulate.h), events: up to 65,535 ranks.

        For benchmarks and tests; help() lists the options. memory, network: alpha and overhead in us, us per byte,
        fan-in share. hierarchical: `algo` between nodes.
        """

plan: _Plan  # a module
