"""How 15-07 compiles and times its small CUDA kernels, and the kernel that reads the same data again.

The kernels that the lesson discusses are in the notebook.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.timing import measure

# In `rounds` rounds, all threads together read the n float4 of `in`. CACHE is to be replaced by the kind of the loads:
# "ca" may use the L1 cache, "cg" goes past it to the L2.
REREAD = r"""
extern "C" __global__ void reread(const float4* in, float* out, int n, int rounds) {
    float sum = 0;
    for (int r = 0; r < rounds; ++r)
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
            float4 x;
            // x = in[i], but we say which cache the load may use
            asm volatile("ld.global.CACHE.v4.f32 {%0,%1,%2,%3}, [%4];"
                         : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(in + i));
            sum += x.x + x.y + x.z + x.w;
        }
    if (sum == 7.0f) out[0] = sum;  // never true in practice; keeps the loads alive
}
"""


def compile_kernel(source: str) -> Callable[..., None]:
    """Compile CUDA source with one kernel, whose name stands behind its `void`."""
    name = source.split("void ")[1].split("(")[0]
    return torch.cuda._compile_kernel(source, name)


def kernel_seconds(
    kernel: Callable[..., None], blocks: int, threads: int, arguments: list[Any], shared: int = 0
) -> float:
    """Seconds for one run of a kernel with so many blocks of so many threads.

    Args:
        kernel: what `compile_kernel` returned.
        blocks: how many blocks of threads are launched.
        threads: threads of each block.
        arguments: what the kernel gets.
        shared: bytes of shared memory that each block takes.
    """

    def launch() -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=arguments, shared_mem=shared)

    # of `measure`, `blocks` are rounds of timing, and not blocks of threads
    return measure(launch, seconds=0.02, blocks=3).median
