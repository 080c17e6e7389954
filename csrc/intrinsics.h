/* The headers of the instruction sets' intrinsics, included before any target pragma. */
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
