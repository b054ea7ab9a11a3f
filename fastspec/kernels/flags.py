"""How a program signals one on another GPU that data is stored: by flags, or by words that hold data and epoch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_release(address, value):
    """A release store by one thread, at system scope: orders it after all that the program stored before a barrier."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 t; .reg .pred one; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0;"
        " @one st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, value],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _load_acquire(address):
    """An acquire load by one thread, at system scope: loads after the next barrier are as new. Others get 2^31 - 1."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 t; .reg .pred one; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0;"
        " mov.u32 $0, 0x7fffffff; @one ld.acquire.sys.global.u32 $0, [$1]; }",
        "=&r,l",
        [address],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _now(zero):
    """The device's clock in nanoseconds."""
    return tl.inline_asm_elementwise("{ mov.u64 $0, %globaltimer; }", "=l,r", [zero], tl.int64, False, 1)


@triton.jit
def _stop_after(start, limit):
    """Ends all work of the device with an error if `limit` nanoseconds have passed since `start`."""
    return tl.inline_asm_elementwise(
        "{ .reg .u64 t; .reg .pred late; mov.u64 t, %globaltimer; sub.u64 t, t, $1; setp.gt.u64 late, t, $2;"
        " @late trap; mov.u32 $0, 0; }",
        "=r,l,l",
        [start, limit],
        tl.int32,
        False,
        1,
    )


@triton.jit
def signalled(flags_ptr, peer, epoch, block, blocks, RANK: tl.constexpr):
    """Signals a peer, by a block's flag, that everything this program has stored so far is visible."""
    flag = tl.load(flags_ptr + peer) + (RANK * blocks + block).to(tl.int64) * 4
    _store_release(flag, epoch)


@triton.jit
def awaited(flags_ptr, peer, epoch, block, blocks, limit, RANK: tl.constexpr):
    """Waits for a peer's signal by a block's flag."""
    flag = tl.load(flags_ptr + RANK) + (peer * blocks + block).to(tl.int64) * 4
    start = _now(epoch)
    while _load_acquire(flag) < epoch:
        _stop_after(start, limit)


@triton.jit
def word_of(value, epoch):
    """Elements of 4 bytes in words of 8, each beside its epoch."""
    return (epoch.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _missing(words, there, epoch):
    """How many words are not of this epoch."""
    return tl.sum(tl.where(there & ((words >> 32).to(tl.int32) != epoch), 1, 0), 0)


@triton.jit
def arrived(place, there, epoch, limit):
    """Waits until all words are of this epoch, one for all or each its own, and returns their elements."""
    start = _now(tl.program_id(0))
    words = tl.load(place, mask=there, other=0, volatile=True)
    while _missing(words, there, epoch) > 0:
        _stop_after(start, limit)
        words = tl.load(place, mask=there, other=0, volatile=True)
    return words.to(tl.int32).to(tl.float32, bitcast=True)
