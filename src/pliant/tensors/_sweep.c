/* The passes over all parameters that an update costs, without an interpreter between the operators.

   Question  How does one pass over the memory do what many of torch's operators do, bit for bit?
   Holds     Elements are independent, so neither the number of threads nor the width of the vectors shows in the result.
             Each operator of torch that an optimizer calls rounds here where it rounds there. Products are added unrounded
             (fused) exactly where torch's are on a processor that can: the caller says so (pliant.tensors.sweep asks
             torch). The compiler must not fuse anything by itself (-ffp-contract=off). No thread outlives a call, so
             that a fork finds none.
   Source    torch/optim/sgd.py, torch/optim/adam.py; docs/design/0025-sweeps.md. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_MSC_VER)
#include <math.h>
#define INLINE __forceinline
#define INDEPENDENT __pragma(loop(ivdep))
#define __builtin_sqrtf sqrtf
#define __builtin_sqrt sqrt
#pragma fp_contract(off)
#else
#include <pthread.h>
#define HAS_THREADS 1
#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#pragma STDC FP_CONTRACT OFF
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#endif

enum { METHOD_SGD, METHOD_ADAM, METHOD_PARK };
enum { FLOAT32, BFLOAT16, FLOAT64, TYPES };
enum { ACT_SETTLE = 1, ACT_AHEAD = 2, ACT_CLEAR = 4, ACT_COPY = 8 };
enum { NONE, PLAIN, NESTEROV, FRESH };
enum { COUPLED = 1, DECOUPLED = 2 };
enum { STATES = 3, LANES = 32, ROW = 11 };
/* Elements at a time: what one piece touches stays in the first-level cache between the update and the look-ahead. */
enum { PIECE = 1024 };
/* Pieces from which one more thread is worth its start. */
enum { PIECES_PER_THREAD = 256, MOST_THREADS = 64 };

/* Columns of a row of numbers. */
enum { SGD_FACTOR, SGD_DECAY, SGD_MOMENTUM, SGD_INCOMING, SGD_RATE, SGD_NESTEROV, SGD_KIND };
enum { ADAM_FACTOR, ADAM_SHRINK, ADAM_DECAY, ADAM_WEIGHT, ADAM_BETA2, ADAM_INCOMING, ADAM_CORRECTION, ADAM_EPS, ADAM_RATE,
       ADAM_KIND, ADAM_AMSGRAD };

/* One parameter: as many elements, in the same order in memory, in each of its tensors.

   The update leads from ``source`` to ``weights``, the look-ahead step from there to ``point``. Each may be the same memory as
   another one. */
typedef struct {
    int64_t count;
    int64_t acts;
    void *weights;
    void *source;
    void *point;
    void *gradient;
    void *state[STATES];
    void *copy;
    void *own;
    const double *settle;
    const double *ahead;
} Segment;

enum { COLUMNS = 13 };

typedef struct {
    int method;
    int type;
    int64_t segments;
    const Segment *segment;
    double factor;  /* of METHOD_PARK */
    double *norms;  /* of METHOD_PARK, by piece */
} Sweep;

static const double ZEROES[PIECE];

#define VARIANT plain
#define TARGET
#define FUSED 0
#include "_sweep_variant.h"
#undef VARIANT
#undef TARGET
#undef FUSED

#if !defined(_MSC_VER) && (defined(__x86_64__) || defined(__i386__))
#define IS_X86 1

#define VARIANT avx2
#define TARGET __attribute__((target("avx2,fma")))
#define FUSED 1
#include "_sweep_variant.h"
#undef VARIANT
#undef TARGET
#undef FUSED

#define VARIANT avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define FUSED 1
#include "_sweep_variant.h"
#undef VARIANT
#undef TARGET
#undef FUSED

#elif defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
#define FUSES_ALWAYS 1

#define VARIANT fused
#define TARGET
#define FUSED 1
#include "_sweep_variant.h"
#undef VARIANT
#undef TARGET
#undef FUSED
#endif

typedef void (*Step)(const Sweep *, const Segment *, int64_t, int64_t);
typedef double (*Park)(const Segment *, double, int64_t, int64_t);

typedef struct {
    const char *name;
    Step step[TYPES];
    Park park[TYPES];
} Variant;

#define TABLE(variant) \
    {#variant, {step_##variant##_float32, step_##variant##_bfloat16, step_##variant##_float64}, \
     {park_##variant##_float32, park_##variant##_bfloat16, park_##variant##_float64}}

static const Variant UNFUSED = TABLE(plain);
#if IS_X86
static const Variant AVX2 = TABLE(avx2), AVX512 = TABLE(avx512);
#elif FUSES_ALWAYS
static const Variant ALWAYS = TABLE(fused);
#endif

/* The loops to be used; NULL: this processor cannot add products unrounded. */
static const Variant *chosen(int fused)
{
    if (!fused)
        return &UNFUSED;
#if IS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        return &AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &AVX2;
    return NULL;
#elif FUSES_ALWAYS
    return &ALWAYS;
#else
    return NULL;
#endif
}

static int64_t pieces_of(const Segment *s)
{
    return (s->count + PIECE - 1) / PIECE;
}

/* The pieces [first, last) of all segments, in order. */
typedef struct {
    const Sweep *sweep;
    const Variant *variant;
    int64_t first, last;
} Share;

static void *swept(void *given)
{
    const Share *share = given;
    const Sweep *sweep = share->sweep;
    int64_t before = 0;
    for (int64_t k = 0; k < sweep->segments && before < share->last; k++) {
        const Segment *s = &sweep->segment[k];
        const int64_t pieces = pieces_of(s);
        int64_t piece = share->first > before ? share->first - before : 0;
        const int64_t stop = share->last - before < pieces ? share->last - before : pieces;
        for (; piece < stop; piece++) {
            const int64_t start = piece * PIECE, rest = s->count - start, n = rest < PIECE ? rest : PIECE;
            if (sweep->method == METHOD_PARK)
                sweep->norms[before + piece] = share->variant->park[sweep->type](s, sweep->factor, start, n);
            else
                share->variant->step[sweep->type](sweep, s, start, n);
        }
        before += pieces;
    }
    return NULL;
}

static void run(const Sweep *sweep, const Variant *variant, int64_t pieces, int threads)
{
    Share shares[MOST_THREADS];
    int64_t workers = pieces / PIECES_PER_THREAD;
    workers = workers < threads ? workers : threads;
    workers = workers < MOST_THREADS ? workers : MOST_THREADS;
    workers = workers > 1 ? workers : 1;
    for (int64_t k = 0; k < workers; k++)
        shares[k] = (Share){sweep, variant, pieces * k / workers, pieces * (k + 1) / workers};
#if HAS_THREADS
    pthread_t thread[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (int64_t k = 1; k < workers; k++)
        started[k] = pthread_create(&thread[k], NULL, swept, &shares[k]) == 0;
    swept(&shares[0]);
    for (int64_t k = 1; k < workers; k++) {
        if (started[k])
            pthread_join(thread[k], NULL);
        else
            swept(&shares[k]);
    }
#else
    for (int64_t k = 0; k < workers; k++)
        swept(&shares[k]);
#endif
}

/* Makes the segments of a table of whole numbers: count, acts, weights, source, point, gradient, state (three), copy, own,
   rows of numbers for the update and for the look-ahead. NULL with an exception set where it is malformed. */
static Segment *segments_of(const Py_buffer *table, const Py_buffer *numbers, int64_t *count, int64_t *pieces)
{
    const int64_t *cell = table->buf;
    const int64_t rows = numbers->len / (int64_t)(ROW * sizeof(double));
    *count = table->len / (int64_t)(COLUMNS * sizeof(int64_t));
    *pieces = 0;
    if (table->len % (COLUMNS * sizeof(int64_t)) || numbers->len % (ROW * sizeof(double))) {
        PyErr_SetString(PyExc_ValueError, "the tables are not a whole number of rows");
        return NULL;
    }
    Segment *segment = malloc((size_t)(*count ? *count : 1) * sizeof(Segment));
    if (segment == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int64_t k = 0; k < *count; k++, cell += COLUMNS) {
        Segment *s = &segment[k];
        if (cell[0] < 0 || cell[11] < 0 || cell[11] >= rows || cell[12] < 0 || cell[12] >= rows) {
            free(segment);
            PyErr_SetString(PyExc_ValueError, "a segment refers to numbers that are not there");
            return NULL;
        }
        s->count = cell[0];
        s->acts = cell[1];
        s->weights = (void *)(intptr_t)cell[2];
        s->source = (void *)(intptr_t)cell[3];
        s->point = (void *)(intptr_t)cell[4];
        s->gradient = (void *)(intptr_t)cell[5];
        for (int i = 0; i < STATES; i++)
            s->state[i] = (void *)(intptr_t)cell[6 + i];
        s->copy = (void *)(intptr_t)cell[9];
        s->own = (void *)(intptr_t)cell[10];
        s->settle = (const double *)numbers->buf + cell[11] * ROW;
        s->ahead = (const double *)numbers->buf + cell[12] * ROW;
        *pieces += pieces_of(s);
    }
    return segment;
}

static PyObject *sweep(PyObject *self, PyObject *args)
{
    Py_buffer table, numbers;
    Sweep all = {0};
    int fused, threads;
    if (!PyArg_ParseTuple(args, "iipidy*y*", &all.method, &all.type, &fused, &threads, &all.factor, &table, &numbers))
        return NULL;
    PyObject *result = NULL;
    int64_t pieces = 0;
    const Variant *variant = chosen(fused);
    Segment *segment = NULL;
    if (all.method < METHOD_SGD || all.method > METHOD_PARK || all.type < 0 || all.type >= TYPES || variant == NULL) {
        PyErr_SetString(PyExc_ValueError, "no loops for these tensors on this processor");
        goto end;
    }
    segment = segments_of(&table, &numbers, &all.segments, &pieces);
    if (segment == NULL)
        goto end;
    all.segment = segment;
    if (all.method == METHOD_PARK) {
        all.norms = malloc((size_t)(pieces ? pieces : 1) * sizeof(double));
        if (all.norms == NULL) {
            PyErr_NoMemory();
            goto end;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    run(&all, variant, pieces, threads);
    Py_END_ALLOW_THREADS
    double total = 0;
    for (int64_t k = 0; all.norms != NULL && k < pieces; k++)
        total += all.norms[k];
    result = PyFloat_FromDouble(total);
end:
    free(segment);
    free(all.norms);
    PyBuffer_Release(&table);
    PyBuffer_Release(&numbers);
    return result;
}

static PyObject *variant(PyObject *self, PyObject *args)
{
    int fused;
    if (!PyArg_ParseTuple(args, "p", &fused))
        return NULL;
    const Variant *found = chosen(fused);
    if (found == NULL)
        Py_RETURN_NONE;
    return PyUnicode_FromString(found->name);
}

static PyMethodDef METHODS[] = {
    {"sweep", sweep, METH_VARARGS, "One pass over all segments; the squared norm of what was parked, else 0."},
    {"variant", variant, METH_VARARGS, "The name of the loops in use, None: this processor has none of that kind."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_sweep", "Passes over all parameters, in one go.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sweep(void)
{
    return PyModule_Create(&MODULE);
}
