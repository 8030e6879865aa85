/* The loops for all element types, for one instruction set.

   Included by _sweep.c, which defines VARIANT (a part of the names), TARGET (a function attribute) and FUSED (whether
   products are added without rounding them first, as torch does where the processor can). */

#define JOINED(a, b, c) a##_##b##_##c
#define EXPANDED(a, b, c) JOINED(a, b, c)
#define NAME(function) EXPANDED(function, VARIANT, TYPE)

#define TYPE float32
#define STORED float
#define REAL float
#define LOAD(x) (x)
#define SAVE(x) (x)
#define ROUND(x) (x)
#define FMA __builtin_fmaf
#define SQRT __builtin_sqrtf
#include "_sweep_loops.h"
#undef TYPE
#undef STORED
#undef LOAD
#undef SAVE
#undef ROUND

/* Half of a float's bits. Every operator of torch reads floats, computes with floats, and rounds. */
#define TYPE bfloat16
#define STORED uint16_t
#define LOAD(x) NAME(widened)(x)
#define SAVE(x) NAME(narrowed)(x)
#define ROUND(x) NAME(rounded)(x)

static INLINE TARGET float NAME(widened)(uint16_t bits)
{
    const union { uint32_t bits; float value; } both = {(uint32_t)bits << 16};
    return both.value;
}

static INLINE TARGET uint16_t NAME(narrowed)(float value)
{
    union { float value; uint32_t bits; } both = {value};
    /* To the nearest, of two equally near ones to the even one. */
    const uint32_t nearest = (both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0 : nearest);
}

static INLINE TARGET float NAME(rounded)(float value)
{
    return NAME(widened)(NAME(narrowed)(value));
}

#include "_sweep_loops.h"
#undef TYPE
#undef STORED
#undef REAL
#undef LOAD
#undef SAVE
#undef ROUND
#undef FMA
#undef SQRT

#define TYPE float64
#define STORED double
#define REAL double
#define LOAD(x) (x)
#define SAVE(x) (x)
#define ROUND(x) (x)
#define FMA __builtin_fma
#define SQRT __builtin_sqrt
#include "_sweep_loops.h"
#undef TYPE
#undef STORED
#undef REAL
#undef LOAD
#undef SAVE
#undef ROUND
#undef FMA
#undef SQRT

#undef JOINED
#undef EXPANDED
#undef NAME
