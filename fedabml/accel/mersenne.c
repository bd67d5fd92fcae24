/* The Mersenne Twister 19937, 624 words at once, and torch's normal and uniform deviates of its words.
 *
 * Box and Muller's method on eight pairs at a time, with the polynomials of the Cephes library (logf, sinf and cosf)
 * rounded where torch rounds them: every FMA, and every product or sum that is not fused, is in its place.
 */
#include <stdint.h>
#include <string.h>

#define FMA __builtin_fmaf
enum { WORDS = 624, AHEAD = 397, GROUP = 16, PAIRS = 8 };

typedef struct { uint32_t state[WORDS]; float fresh[WORDS]; int next; } Twister;

static void begin(Twister *t, uint32_t seed) {
  t->state[0] = seed;
  for (int i = 1; i < WORDS; i++) t->state[i] = seed = 1812433253u * (seed ^ seed >> 30) + i;
  t->next = WORDS;
}

static inline uint32_t twisted(uint32_t high, uint32_t low, uint32_t ahead) {
  return ahead ^ ((high & 0x80000000u) | (low & 0x7fffffffu)) >> 1 ^ (-(low & 1) & 0x9908b0dfu);
}

static void refill(Twister *t) {
  uint32_t *s = t->state;
  for (int i = 0; i < WORDS - AHEAD; i++) s[i] = twisted(s[i], s[i + 1], s[i + AHEAD]);
  for (int i = WORDS - AHEAD; i < WORDS - 1; i++) s[i] = twisted(s[i], s[i + 1], s[i + AHEAD - WORDS]);
  s[WORDS - 1] = twisted(s[WORDS - 1], s[0], s[AHEAD - 1]);
  for (int i = 0; i < WORDS; i++) {
    uint32_t y = s[i];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    y ^= y >> 18;
    t->fresh[i] = (float)(int32_t)(y & 0xffffff) * 0x1p-24f;
  }
  t->next = 0;
}

static inline uint32_t bits(float x) { uint32_t i; memcpy(&i, &x, 4); return i; }
static inline float real(uint32_t i) { float x; memcpy(&x, &i, 4); return x; }

static inline float logarithm(float x) {
  float e = (float)((int32_t)(bits(x) >> 23) - 127) + 1, m = real((bits(x) & 0x007fffff) | 0x3f000000);
  int small = m < 0.707106781186547524f;
  e = small ? e - 1 : e;
  m = m - 1 + (small ? m : 0);
  float z = m * m, y = FMA(7.0376836292e-2f, m, -1.1514610310e-1f);
  y = FMA(y, m, 1.1676998740e-1f);
  y = FMA(y, m, -1.2420140846e-1f);
  y = FMA(y, m, 1.4249322787e-1f);
  y = FMA(y, m, -1.6668057665e-1f);
  y = FMA(y, m, 2.0000714765e-1f);
  y = FMA(y, m, -2.4999993993e-1f);
  y = FMA(y, m, 3.3333331174e-1f);
  y = FMA(y * m, z, e * -2.12194440e-4f);
  y = FMA(-z, 0.5f, y);
  return FMA(e, 0.693359375f, m + y);
}

static inline void deviates(const float *u, float *out) {
  for (int k = 0; k < PAIRS; k++) {
    float radius = __builtin_sqrtf(-2 * logarithm(1 - u[k])), x = 6.28318530717958647692f * u[PAIRS + k];
    int32_t octant = ((int32_t)(x * 1.27323954473516f) + 1) & ~1;
    float y = (float)octant;
    x = FMA(y, -0.78515625f, x);
    x = FMA(y, -2.4187564849853515625e-4f, x);
    x = FMA(y, -3.77489497744594108e-8f, x);
    float z = x * x, c = FMA(2.443315711809948e-5f, z, -1.388731625493765e-3f);
    c = FMA(c, z, 4.166664568298827e-2f) * z;
    c = FMA(c, z, -(z * 0.5f)) + 1;
    float s = FMA(-1.9515295891e-4f, z, 8.3321608736e-3f);
    s = FMA(s, z, -1.6666654611e-1f) * z;
    s = FMA(s, x, x);
    float sine = octant & 2 ? c : s, cosine = octant & 2 ? s : c;
    sine = real(bits(sine) ^ (uint32_t)(octant & 4) << 29);
    cosine = real(bits(cosine) ^ (uint32_t)(~(octant - 2) & 4) << 29);
    out[k] = radius * cosine + 0;  /* no negative zeros */
    out[PAIRS + k] = radius * sine + 0;
  }
}

static void normal(Twister *t, float *out, int64_t n) {
  int64_t whole = n / GROUP * GROUP;
  for (int64_t i = 0; i < whole; i += GROUP) {
    if (t->next == WORDS) refill(t);
    deviates(t->fresh + t->next, out + i);
    t->next += GROUP;
  }
  if (whole == n) return;
  float last[GROUP];  /* those that remain are skipped, and the last sixteen made anew */
  for (int64_t i = whole - n; i < GROUP; i++) {
    if (t->next == WORDS) refill(t);
    if (i >= 0) last[i] = t->fresh[t->next];
    t->next++;
  }
  deviates(last, out + n - GROUP);
}

static void uniform(Twister *t, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i += WORDS) {
    refill(t);
    memcpy(out + i, t->fresh, 4 * (n - i < WORDS ? n - i : WORDS));
  }
}

#define ROWS(KIND) \
  void KIND##_rows(const int64_t *seeds, float *out, int64_t n, int64_t first, int64_t last) { \
    for (int64_t row = first; row < last; row++) { \
      Twister t; \
      begin(&t, (uint32_t)seeds[row]); \
      KIND(&t, out + row * n, n); \
    } \
  }
ROWS(normal)
ROWS(uniform)
