"""The structures of registry_types.h for ctypes. Nothing else knows their layout."""

from __future__ import annotations

import ctypes
from enum import IntEnum

U3 = ctypes.c_uint * 3


class Kind(IntEnum):
    """What was found, as in kinds.h."""

    NONE = 0
    OUT_OF_BOUNDS = 1
    READ_ONLY = 2
    RACE = 3
    UNINITIALIZED = 4
    MISALIGNED = 5
    DIVERGENT_BARRIER = 6
    WARP_MASK = 7
    DEADLOCK = 8
    ENDLESS_LOOP = 9
    STACK_OVERFLOW = 10
    ASYNC_COPY = 11
    UNDEFINED = 12
    DEVICE_ASSERT = 13
    CRASH = 14
    UNSUPPORTED = 15
    SHARED_MEMORY = 16


class Scalar(IntEnum):
    """What a parameter is made of."""

    OPAQUE = 0
    BOOL = 1
    SIGNED = 2
    UNSIGNED = 3
    FLOAT16 = 4
    BFLOAT16 = 5
    FLOAT32 = 6
    FLOAT64 = 7


class ParameterInfo(ctypes.Structure):
    """One parameter of a kernel."""

    _fields_ = (
        ("is_pointer", ctypes.c_bool),
        ("is_const", ctypes.c_bool),
        ("scalar", ctypes.c_int),
        ("bytes", ctypes.c_int),
        ("alignment", ctypes.c_int),
        ("element_bytes", ctypes.c_int),
        ("scalar_bytes", ctypes.c_int),
    )


class KernelInfo(ctypes.Structure):
    """One kernel; `next` chains them."""


KernelInfo._fields_ = (
    ("name", ctypes.c_char_p),
    ("parameter_names", ctypes.c_char_p),
    ("parameters", ctypes.POINTER(ParameterInfo)),
    ("num_parameters", ctypes.c_int),
    ("max_threads", ctypes.c_int),
    ("c_linkage", ctypes.c_bool),
    ("call", ctypes.c_void_p),
    ("next", ctypes.POINTER(KernelInfo)),
)


class ArgumentRange(ctypes.Structure):
    """The bytes of one array argument."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("index", ctypes.c_int),
        ("read_only", ctypes.c_int),
    )


class StackRegion(ctypes.Structure):
    """The stacks of all threads; all zeros before the first launch of a process."""

    _fields_ = (("begin", ctypes.c_size_t), ("num_made", ctypes.c_size_t))


class LaunchSpec(ctypes.Structure):
    """One launch."""

    _fields_ = (
        ("kernel", ctypes.POINTER(KernelInfo)),
        ("stacks", ctypes.POINTER(StackRegion)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("ranges", ctypes.POINTER(ArgumentRange)),
        ("num_ranges", ctypes.c_int),
        ("grid", U3),
        ("block", U3),
        ("dynamic_shared_bytes", ctypes.c_uint),
        ("max_shared_bytes", ctypes.c_uint),
        ("shuffle", ctypes.c_int),
        ("global_races", ctypes.c_int),
        ("isolated", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("max_steps", ctypes.c_uint64),
    )


class ThreadPlace(ctypes.Structure):
    """A thread of a grid."""

    _fields_ = (("block", U3), ("thread", U3))


class Finding(ctypes.Structure):
    """The first fault of a launch."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("argument", ctypes.c_int),
        ("byte_offset", ctypes.c_longlong),
        ("access_bytes", ctypes.c_int),
        ("element_bytes", ctypes.c_int),
        ("is_write", ctypes.c_int),
        ("line", ctypes.c_int),
        ("has_other", ctypes.c_int),
        ("other_is_write", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("here", ThreadPlace),
        ("other", ThreadPlace),
        ("other_pc", ctypes.c_uint64),
        ("other_line", ctypes.c_int),
        ("other_file", ctypes.c_char * 512),
        ("here_code", ctypes.c_uint64),
        ("pcs", ctypes.c_uint64 * 24),
        ("num_pcs", ctypes.c_int),
        ("file", ctypes.c_char * 512),
        ("object", ctypes.c_char * 128),
        ("message", ctypes.c_char * 3072),
    )
