"""CUDA graphs that loop on the device: a WHILE node around a step, built with cuda-bindings. Needs sm_90 or later.

A launch runs `begin`, then the body: the step and `go_on`, which decides whether there is another round. Both count
the rows that run, so a loop ends when one of them finishes, or when it has made as many steps as it may.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# control: steps a launch may make, those still to make, rows that were running when it began
_SOURCE = r"""
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
typedef long long i64;

extern "C" __global__ void begin(unsigned long long handle, i64* control, const i64* finish, int rows) {
    int running = __syncthreads_count(threadIdx.x < rows && finish[threadIdx.x] == 0);
    if (threadIdx.x == 0) {
        control[1] = control[0];
        control[2] = running;
        cudaGraphSetConditional(handle, running > 0 && control[0] > 0);
    }
}

extern "C" __global__ void go_on(unsigned long long handle, i64* control, const i64* finish, int rows) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int running = __syncthreads_count(threadIdx.x < rows && finish[threadIdx.x] == 0);
    if (threadIdx.x == 0) {
        i64 left = control[1] - 1;
        control[1] = left;
        cudaGraphSetConditional(handle, left > 0 && running == control[2]);
    }
}

extern "C" __global__ void stamp(i64* stamps, i64 size) {  // stamps[0]: how many there are
    i64 now, count = stamps[0] + 1;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    if (count < size) stamps[count] = now;
    stamps[0] = count;
}
"""
THREADS = 64  # of begin and go_on: at least as many as rows
_LOOP_TYPES = (ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_int)

Arguments = tuple[tuple[Any, ...], tuple[Any, ...]]  # values and their ctypes
Launch = Callable[[], None]
Fill = Callable[[Any, Arguments], None]  # puts a step and `go_on`, with these arguments, into the body of a loop


@cache
def cu() -> Any:
    """The driver's functions."""
    return importlib.import_module("cuda.bindings.driver")


def checked(answer: tuple[Any, ...], what: str = "a CUDA call") -> Any:
    """What a call of cuda-bindings returned besides its status.

    Raises:
        RuntimeError: the status says that it failed.
    """
    status, *values = answer
    if int(status):
        raise RuntimeError(f"{what}: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else values


@cache
def kernel(name: str) -> Any:
    """One of the kernels above, for the current device."""
    return checked(cu().cuModuleGetFunction(_module(), name.encode()), name)


@cache
def _module() -> Any:
    """The kernels, loaded: the driver resolves cudaGraphSetConditional by itself, nothing is linked."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    program = checked(nvrtc.nvrtcCreateProgram(_SOURCE.encode(), b"while_graph.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options), "compiling the kernels")
    binary = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, binary))
    return checked(cu().cuModuleLoadData(binary), "loading the kernels")


def stream() -> int:
    """Handle of the current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def launch_kernel(name: str, arguments: Arguments, threads: int, *, pdl: bool = False) -> None:
    """Launches one block; with pdl it may start before the kernel ahead of it ends."""
    config = cu().CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = threads
    config.hStream = cu().CUstream(stream())
    if pdl:
        attribute = cu().CUlaunchAttribute()
        attribute.id = cu().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    checked(cu().cuLaunchKernelEx(config, kernel(name), arguments, 0), f"launching {name}")


def kernel_node(graph: Any, after: list[Any], name: str, arguments: Arguments, threads: int = THREADS) -> Any:
    """Adds one block to a graph."""
    node = cu().CUDA_KERNEL_NODE_PARAMS()
    node.func = kernel(name)
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
    node.blockDimX = threads
    node.kernelParams = arguments
    return checked(cu().cuGraphAddKernelNode(graph, after, len(after), node), f"a node for {name}")


def child_node(graph: Any, after: list[Any], part: torch.cuda.CUDAGraph) -> Any:
    """Adds a copy of a kept graph to a graph, as one node."""
    raw = cu().CUgraph(part.raw_cuda_graph())
    return checked(cu().cuGraphAddChildGraphNode(graph, after, len(after), raw), "a child graph")


def instantiated(graph: Any) -> Launch:
    """What queues one launch of the graph in the current stream.

    Raises:
        RuntimeError: with the driver's reason.
    """
    how = cu().CUDA_GRAPH_INSTANTIATE_PARAMS()
    answer = cu().cuGraphInstantiateWithParams(graph, how)
    executable = checked(answer, f"instantiating, {getattr(how.result_out, 'name', how.result_out)}")
    return lambda: checked(cu().cuGraphLaunch(executable, cu().CUstream(stream())), "launching")


def new_graph() -> Any:
    """A graph without nodes."""
    return checked(cu().cuGraphCreate(0))


class WhileGraph:
    """Up to `control[0]` steps a launch, fewer when a row of `finish` [B] int64 finishes; none when no row runs.

    Args:
        finish: 0 for rows that run, as in DecodeState.
        fill: what a step is.

    Raises:
        RuntimeError: the driver refuses the graph.
    """

    def __init__(self, finish: Tensor, fill: Fill) -> None:
        self.control = torch.zeros(3, dtype=torch.int64, device=finish.device)
        self._finish = finish
        context = checked(cu().cuCtxGetCurrent())
        self._graph = new_graph()
        handle = checked(cu().cuGraphConditionalHandleCreate(self._graph, context, 0, 0), "a handle")
        values = (int(handle), self.control.data_ptr(), finish.data_ptr(), finish.shape[0])
        begin = kernel_node(self._graph, [], "begin", (values, _LOOP_TYPES))
        node = cu().CUgraphNodeParams()
        node.type = cu().CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = cu().CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        checked(cu().cuGraphAddNode(self._graph, [begin], None, 1, node), "a WHILE node")
        fill(node.conditional.phGraph_out[0], (values, _LOOP_TYPES))
        self.launch = instantiated(self._graph)


def fill_with_child(step: torch.cuda.CUDAGraph) -> Fill:
    """The body is the captured step as a child graph, and `go_on` behind it."""

    def fill(body: Any, arguments: Arguments) -> None:
        kernel_node(body, [child_node(body, [], step)], "go_on", arguments)

    return fill


def fill_by_capture(step: Launch, pool: torch.cuda.MemPool, *, pdl: bool) -> Fill:
    """The body is captured in place: the step's own kernels and `go_on`, which with pdl starts early.

    Args:
        step: launches a step in the current stream.
        pool: what it allocates from; must outlive the graph.
    """

    def fill(body: Any, arguments: Arguments) -> None:
        relaxed = cu().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        here = cu().CUstream(stream())
        with torch.cuda.use_mem_pool(pool):
            checked(cu().cuStreamBeginCaptureToGraph(here, body, None, None, 0, relaxed), "capturing into the body")
            try:
                step()
                launch_kernel("go_on", arguments, THREADS, pdl=pdl)
            finally:
                ended = cu().cuStreamEndCapture(here)
        checked(ended, "the end of capturing into the body")

    return fill


def bare_costs(rounds: int = 2000) -> dict[str, float]:
    """Microseconds of a round of a loop without a step, of launching such a loop, and of launching one kernel."""
    finish = torch.zeros(1, dtype=torch.int64, device="cuda")
    loop = WhileGraph(finish, lambda body, arguments: kernel_node(body, [], "go_on", arguments))
    stamps = torch.zeros(2, dtype=torch.int64, device="cuda")
    single = new_graph()
    kernel_node(single, [], "stamp", ((stamps.data_ptr(), 1), (ctypes.c_ulonglong, ctypes.c_longlong)), 1)
    one_kernel = instantiated(single)

    def took(launch: Launch, times: int) -> float:
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                launch()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best / rounds * 1e6

    loop.control[0] = rounds
    per_round = took(loop.launch, 1)
    loop.control[0] = 1
    return {"round_us": per_round, "loop_us": took(loop.launch, rounds), "graph_us": took(one_kernel, rounds)}
