/* The loops over one piece of memory, for one element type and one instruction set.

   Included by _sweep_variant.h, which defines NAME, TARGET, FUSED, STORED (in memory), REAL (in registers), LOAD, SAVE,
   ROUND and the functions FMA and SQRT. Each macro below is one torch operator: it rounds where that operator does. */

#if FUSED
#define MADD(a, b, c) FMA((a), (b), (c))
#else
#define MADD(a, b, c) ((a) * (b) + (c))
#endif

#define TIMES(a, s) ROUND((a) * (s))                             /* a.mul(s) */
#define PLUS(a, b, alpha) ROUND(MADD((b), (alpha), (a)))         /* a.add(b, alpha=alpha) */
#define ADDCMUL(a, b, c, value) ROUND(MADD((value) * (b), (c), (a)))
#define ADDCDIV(a, b, c, value) ROUND((a) + (value) * (b) / (c))

/* A step of SGD from ``source`` to ``weights``. ``ahead``: the weights before it go to ``copy``, too, and the momentum stays
   as it is. ``momentum``: NONE, PLAIN, NESTEROV, or FRESH (Nesterov without a buffer yet). */
static INLINE TARGET void NAME(sgd)(int64_t n, const STORED *source, STORED *weights, const STORED *gradient,
                                    STORED *buffer, STORED *copy, const double *row, const int ahead, const int decays,
                                    const int momentum)
{
    const REAL factor = (REAL)row[SGD_FACTOR], decay = (REAL)row[SGD_DECAY], keep = (REAL)row[SGD_MOMENTUM];
    const REAL incoming = (REAL)row[SGD_INCOMING], rate = (REAL)row[SGD_RATE], look = (REAL)row[SGD_NESTEROV];
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) {
        const REAL w = LOAD(source[i]);
        REAL g = TIMES(LOAD(gradient[i]), factor);
        if (decays)
            g = PLUS(g, w, decay);
        if (momentum == FRESH) {
            g = PLUS(g, g, look);
        } else if (momentum != NONE) {
            const REAL kept = TIMES(LOAD(buffer[i]), keep);
            const REAL b = PLUS(kept, g, incoming);
            if (!ahead)
                buffer[i] = SAVE(b);
            g = momentum == NESTEROV ? PLUS(g, b, look) : b;
        }
        if (ahead)
            copy[i] = SAVE(w);
        weights[i] = SAVE(PLUS(w, g, rate));
    }
}

/* A step of Adam or AdamW. ``decay``: NONE, COUPLED or DECOUPLED. */
static INLINE TARGET void NAME(adam)(int64_t n, const STORED *source, STORED *weights, const STORED *gradient,
                                     STORED *first, STORED *second, STORED *largest, STORED *copy, const double *row,
                                     const int ahead, const int decay, const int amsgrad)
{
    const REAL factor = (REAL)row[ADAM_FACTOR], shrink = (REAL)row[ADAM_SHRINK], coupled = (REAL)row[ADAM_DECAY];
    const REAL weight = (REAL)row[ADAM_WEIGHT], beta2 = (REAL)row[ADAM_BETA2], incoming = (REAL)row[ADAM_INCOMING];
    const REAL correction = (REAL)row[ADAM_CORRECTION], eps = (REAL)row[ADAM_EPS], rate = (REAL)row[ADAM_RATE];
    const int small = weight < (REAL)0.5;
    const REAL share = small ? weight : weight - (REAL)1;
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) {
        const REAL plain = LOAD(source[i]);
        REAL w = plain, g = TIMES(LOAD(gradient[i]), factor);
        if (decay == DECOUPLED)
            w = TIMES(w, shrink);
        if (decay == COUPLED)
            g = PLUS(g, w, coupled);
        const REAL m0 = LOAD(first[i]);
        const REAL m = ROUND(MADD(share, g - m0, small ? m0 : g));
        const REAL faded = TIMES(LOAD(second[i]), beta2);
        const REAL v = ADDCMUL(faded, g, g, incoming);
        REAL u = v;
        if (amsgrad) {
            const REAL top = LOAD(largest[i]);
            /* As torch.maximum: not a number wins. */
            u = top > v || top != top ? top : v;
        }
        if (!ahead) {
            first[i] = SAVE(m);
            second[i] = SAVE(v);
            if (amsgrad)
                largest[i] = SAVE(u);
        } else {
            copy[i] = SAVE(plain);
        }
        const REAL root = ROUND(SQRT(u));
        const REAL corrected = ROUND(root / correction);
        const REAL under = ROUND(corrected + eps);
        weights[i] = SAVE(ADDCDIV(w, m, under, rate));
    }
}

#define SGD_LOOP(ahead, decays, momentum) \
    NAME(sgd)(n, source, weights, gradient, buffer, copy, row, ahead, decays, momentum); break;
#define SGD_LOOPS(ahead, decays) \
    case NONE: SGD_LOOP(ahead, decays, NONE) \
    case PLAIN: SGD_LOOP(ahead, decays, PLAIN) \
    case NESTEROV: SGD_LOOP(ahead, decays, NESTEROV) \
    case FRESH: SGD_LOOP(ahead, decays, FRESH)

static TARGET void NAME(sgd_step)(int64_t n, const STORED *source, STORED *weights, const STORED *gradient,
                                   STORED *const *state, STORED *copy, const double *row, int ahead)
{
    STORED *buffer = state[0];
    int momentum = (int)row[SGD_KIND];
    const int decays = row[SGD_DECAY] != 0;
    if (momentum != NONE && buffer == NULL)
        momentum = momentum == NESTEROV ? FRESH : NONE;
    if (ahead && decays)
        switch (momentum) { SGD_LOOPS(1, 1) }
    else if (ahead)
        switch (momentum) { SGD_LOOPS(1, 0) }
    else if (decays)
        switch (momentum) { SGD_LOOPS(0, 1) }
    else
        switch (momentum) { SGD_LOOPS(0, 0) }
}

#define ADAM_LOOP(ahead, decay, amsgrad) \
    NAME(adam)(n, source, weights, gradient, state[0], state[1], state[2], copy, row, ahead, decay, amsgrad); break;
#define ADAM_LOOPS(ahead, amsgrad) \
    case NONE: ADAM_LOOP(ahead, NONE, amsgrad) \
    case COUPLED: ADAM_LOOP(ahead, COUPLED, amsgrad) \
    case DECOUPLED: ADAM_LOOP(ahead, DECOUPLED, amsgrad)

static TARGET void NAME(adam_step)(int64_t n, const STORED *source, STORED *weights, const STORED *gradient,
                                   STORED *const *state, STORED *copy, const double *row, int ahead)
{
    const int decay = (int)row[ADAM_KIND], amsgrad = row[ADAM_AMSGRAD] != 0;
    if (ahead && amsgrad)
        switch (decay) { ADAM_LOOPS(1, 1) }
    else if (ahead)
        switch (decay) { ADAM_LOOPS(1, 0) }
    else if (amsgrad)
        switch (decay) { ADAM_LOOPS(0, 1) }
    else
        switch (decay) { ADAM_LOOPS(0, 0) }
}

typedef void (*NAME(Method))(int64_t, const STORED *, STORED *, const STORED *, STORED *const *, STORED *, const double *,
                             int);

static INLINE TARGET STORED *NAME(at)(void *begin, int64_t start)
{
    return begin ? (STORED *)begin + start : NULL;
}

/* One piece of a segment: the update, the look-ahead step, or both. */
static TARGET void NAME(step)(const Sweep *sweep, const Segment *s, int64_t start, int64_t n)
{
    STORED *weights = NAME(at)(s->weights, start), *copy = NAME(at)(s->copy, start);
    STORED *state[STATES], *gradient = NAME(at)(s->gradient, start);
    for (int k = 0; k < STATES; k++)
        state[k] = NAME(at)(s->state[k], start);
    const NAME(Method) step = sweep->method == METHOD_SGD ? NAME(sgd_step) : NAME(adam_step);
    if (s->acts & ACT_SETTLE)
        step(n, NAME(at)(s->source, start), weights, gradient, state, NULL, s->settle, 0);
    if (s->acts & ACT_CLEAR)
        memset(gradient, 0, (size_t)n * sizeof(STORED));
    if (s->acts & ACT_AHEAD) {
        const STORED *own = s->own ? NAME(at)(s->own, start) : (const STORED *)ZEROES;
        STORED nothing[PIECE];
        if (sweep->method == METHOD_ADAM && state[0] == NULL) {
            memset(nothing, 0, (size_t)n * sizeof(STORED));
            state[0] = state[1] = state[2] = nothing;
        }
        step(n, weights, NAME(at)(s->point, start), own, state, copy, s->ahead, 1);
    } else if (s->acts & ACT_COPY) {
        memcpy(copy, weights, (size_t)n * sizeof(STORED));
    }
}

/* The squared norm of one piece of gradients, which are multiplied first, in place; ``copy``: kept there, too.

   LANES sums side by side, added in a fixed order: the result is the same with any instruction set and any number of
   threads. */
static INLINE TARGET double NAME(norm)(int64_t n, STORED *gradient, STORED *copy, const REAL factor, const int scales,
                                       const int copies)
{
    double lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            REAL g = LOAD(gradient[i + k]);
            if (scales) {
                g = TIMES(g, factor);
                gradient[i + k] = SAVE(g);
            }
            if (copies)
                copy[i + k] = SAVE(g);
            lanes[k] += (double)g * (double)g;
        }
    for (int k = 0; i < n; i++, k++) {
        REAL g = LOAD(gradient[i]);
        if (scales) {
            g = TIMES(g, factor);
            gradient[i] = SAVE(g);
        }
        if (copies)
            copy[i] = SAVE(g);
        lanes[k] += (double)g * (double)g;
    }
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++)
            lanes[k] += lanes[k + width];
    return lanes[0];
}

static TARGET double NAME(park)(const Segment *s, double factor, int64_t start, int64_t n)
{
    STORED *gradient = (STORED *)s->gradient + start;
    STORED *copy = s->copy ? (STORED *)s->copy + start : NULL;
    if (factor != 1.0)
        return copy ? NAME(norm)(n, gradient, copy, (REAL)factor, 1, 1)
                    : NAME(norm)(n, gradient, copy, (REAL)factor, 1, 0);
    return copy ? NAME(norm)(n, gradient, copy, 1, 0, 1) : NAME(norm)(n, gradient, copy, 1, 0, 0);
}

#undef MADD
#undef TIMES
#undef PLUS
#undef ADDCMUL
#undef ADDCDIV
#undef SGD_LOOP
#undef SGD_LOOPS
#undef ADAM_LOOP
#undef ADAM_LOOPS
