// Calls through the C interface that no caller should make. Numbers and pointers that cannot mean anything must be
// refused before memory is touched; odd ones that can mean something may be served, within the buffers. Those are
// allocated to the byte, so that a sanitizer sees every access beyond them. What the library cannot know, the true size
// of a buffer, is not lied about here. Usage: malformed SEED CASES
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "adaattn.h"

namespace {

std::mt19937_64 rng;
int64_t pick(int64_t lo, int64_t hi) { return lo + static_cast<int64_t>(rng() % static_cast<uint64_t>(hi - lo + 1)); }
template <class T> T any(std::initializer_list<T> from) { return from.begin()[pick(0, static_cast<int64_t>(from.size()) - 1)]; }
int64_t far() { return any<int64_t>({INT64_MAX, INT64_MAX - 1, int64_t(1) << 62, (int64_t(1) << 40) + 1}); }
int64_t huge() { return any<int64_t>({INT64_MAX, int64_t(1) << 62, int64_t(1) << 33, (int64_t(1) << 32) + 1}); }
int64_t size_of(int64_t dtype) { return dtype == ADA_F32 ? 4 : dtype == ADA_I8 || dtype == ADA_U8F ? 1 : 2; }
constexpr char CANARY = 0x5a;

struct Call {
  ada_args a;
  std::vector<char *> memory;
  Call() = default;
  Call(const Call &) = delete;
  ~Call() {
    for (char *p : memory) std::free(p);
  }
  // bytes of numbers: finite ones mostly, whatever their dtype, and now and then any at all
  char *bytes(int64_t n, bool wild = false) {
    char *p = static_cast<char *>(std::malloc(static_cast<size_t>(n ? n : 1)));
    memory.push_back(p);
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<char>(wild ? pick(0, 255) : pick(0, 62));
    return p;
  }
  template <class T> T *numbers(int64_t n, std::function<T()> draw) {
    T *p = reinterpret_cast<T *>(bytes(n * static_cast<int64_t>(sizeof(T))));
    for (int64_t i = 0; i < n; ++i) p[i] = draw();
    return p;
  }
};

void strides(int64_t *to, int64_t heads, int64_t len, int64_t dim) {
  to[0] = heads * len * dim, to[1] = len * dim, to[2] = dim, to[3] = 1;
}

// A call that must be served, with as many of the rules as chance gives it.
void draw(Call &c, bool backward) {
  ada_args &a = c.a;
  std::memset(&a, 0, sizeof a);
  a.batch = pick(1, 2), a.kv_heads = pick(1, 2), a.q_heads = a.kv_heads * pick(1, 3);
  a.q_len = pick(1, pick(0, 3) ? 9 : 90), a.kv_len = pick(1, pick(0, 3) ? 20 : 150), a.dim = pick(1, 40), a.dim_v = pick(1, 40);
  a.q_dtype = a.kv_dtype = a.v_dtype = pick(0, 2);
  const bool stored = !backward && pick(0, 3) == 0, wild = pick(0, 3) == 0;
  if (stored) {
    a.kv_dtype = a.v_dtype = ADA_I8;
    a.scale_dtype = pick(0, 1) ? ADA_F32 : ADA_U8F;
    const int64_t n = a.batch * a.kv_heads * a.kv_len;
    a.k_scale = c.bytes(n * size_of(a.scale_dtype)), a.v_scale = c.bytes(n * size_of(a.scale_dtype));
    a.kss[0] = a.vss[0] = a.kv_heads * a.kv_len, a.kss[1] = a.vss[1] = a.kv_len, a.kss[2] = a.vss[2] = 1;
    if (pick(0, 1)) a.first_key = c.numbers<float>(a.batch * a.kv_heads * a.dim, [] { return 0.5f; });
    a.rotated = pick(0, 3);
    if (pick(0, 2) == 0) a.v_dtype = ADA_I4, a.dim_v = 32;
  }
  const int64_t q_bytes = size_of(a.q_dtype), k_bytes = size_of(a.kv_dtype), v_dim = a.v_dtype == ADA_I4 ? a.dim_v / 2 : a.dim_v;
  const int64_t rows = a.batch * a.q_heads * a.q_len, keys = a.batch * a.kv_heads * a.kv_len;
  a.q = c.bytes(rows * a.dim * q_bytes, wild), a.k = c.bytes(keys * a.dim * k_bytes, wild);
  a.v = c.bytes(keys * v_dim * k_bytes, wild), a.out = c.bytes(rows * a.dim_v * q_bytes);
  std::memset(a.out, CANARY, static_cast<size_t>(rows * a.dim_v * q_bytes));
  a.lse = c.numbers<float>(rows, [] { return 1.0f; });
  strides(a.qs, a.q_heads, a.q_len, a.dim), strides(a.ks, a.kv_heads, a.kv_len, a.dim);
  strides(a.vs, a.kv_heads, a.kv_len, v_dim), strides(a.os, a.q_heads, a.q_len, a.dim_v);
  a.scaling = 0.25, a.threads = pick(1, 3);
  do a.level = pick(-1, ADA_AMX);
  while (a.level >= 0 && !ada_has_level(a.level));
  a.causal = pick(0, 1), a.window = pick(0, 1) ? -1 : pick(1, 30), a.sinks = pick(0, 3), a.offset = pick(-3, 9);
  if (pick(0, 2) == 0) {
    a.n_segments = a.batch;
    int64_t *s = c.numbers<int64_t>(6 * a.batch, [] { return int64_t(0); });
    for (int64_t b = 0; b < a.batch; ++b) {
      const int64_t row[6] = {b, 0, pick(0, a.q_len), 0, pick(0, a.kv_len), pick(-3, 9)};
      std::memcpy(s + 6 * b, row, sizeof row);
    }
    a.segments = s;
  }
  if (pick(0, 2) == 0) {
    a.head_windows = c.numbers<int64_t>(a.kv_heads, [] { return pick(-1, 30); });
    a.head_sinks = c.numbers<int64_t>(a.kv_heads, [] { return pick(0, 3); });
  }
  if (pick(0, 3) == 0) a.softcap = 3.0;
  if (pick(0, 2) == 0) a.sink_logits = c.numbers<float>(a.q_heads, [] { return 0.5f; });
  if (pick(0, 2) == 0) {
    a.bias_dtype = pick(0, 2);
    a.bias = c.bytes(a.batch * a.kv_len * size_of(a.bias_dtype), wild);
    a.bs[0] = a.kv_len, a.bs[3] = 1;
  }
  if (pick(0, 2) == 0) a.mask = reinterpret_cast<uint8_t *>(c.bytes(a.batch * a.kv_len, true)), a.ms[0] = a.kv_len, a.ms[3] = 1;
  if (!backward) return;
  a.dout = c.bytes(rows * a.dim_v * q_bytes, wild), a.dq = c.bytes(rows * a.dim * q_bytes);
  a.dk = c.bytes(keys * a.dim * k_bytes), a.dv = c.bytes(keys * a.dim_v * k_bytes);
  strides(a.gs, a.q_heads, a.q_len, a.dim_v), strides(a.dqs, a.q_heads, a.q_len, a.dim);
  strides(a.dks, a.kv_heads, a.kv_len, a.dim), strides(a.dvs, a.kv_heads, a.kv_len, a.dim_v);
  std::memset(a.dq, 0, static_cast<size_t>(rows * a.dim * q_bytes));
  std::memset(a.dk, 0, static_cast<size_t>(keys * a.dim * k_bytes)), std::memset(a.dv, 0, static_cast<size_t>(keys * a.dim_v * k_bytes));
  if (ada_forward(&a)) std::abort();
  std::memset(a.out, CANARY, static_cast<size_t>(rows * a.dim_v * q_bytes));
}

int64_t codes(std::initializer_list<int64_t> good) {  // of an enumeration, but none of these
  for (;;) {
    const int64_t n = any<int64_t>({-1, 0, 1, 2, 3, 4, 5, 99, INT64_MIN, INT64_MAX});
    bool is_good = false;
    for (int64_t g : good) is_good |= g == n;
    if (!is_good) return n;
  }
}

// One change that makes no sense; returns its name, or null where it does not apply.
const char *spoil(Call &c, bool backward) {
  ada_args &a = c.a;
  const bool i8 = a.kv_dtype == ADA_I8;
  int64_t *extents[] = {&a.batch, &a.q_heads, &a.kv_heads, &a.q_len, &a.kv_len, &a.dim, &a.dim_v};
  switch (pick(0, 22)) {
    case 0: return *extents[pick(0, 6)] = any<int64_t>({-1, -7, INT64_MIN}), "a negative extent";
    case 1: return *extents[pick(0, 6)] = huge(), "an extent beyond memory";
    case 2: return *any<int64_t *>({&a.q_heads, &a.kv_heads, &a.dim, &a.dim_v}) = 0, "an extent of nothing";
    case 3: return a.kv_heads = a.q_heads + 1, "more key heads than query heads";
    case 4: return a.threads = any<int64_t>({0, -1, INT64_MIN}), "no threads";
    case 5: return a.level = any<int64_t>({ADA_AMX + 1, 77, INT64_MAX}), "an unknown level";
    case 6: return *any<int64_t *>({&a.offset, &a.window, &a.sinks}) = far(), "a distance beyond reason";
    case 7: return a.offset = any<int64_t>({INT64_MIN, -far()}), "an offset before everything";
    case 8: return a.sinks = any<int64_t>({-1, INT64_MIN}), "fewer sinks than none";
    case 9: return *any<const void **>({&a.q, &a.k, &a.v}) = nullptr, "a null tensor";
    case 10: return a.out = nullptr, a.lse = nullptr, "nothing to write to";
    case 11: return a.q_dtype = codes({0, 1, 2}), "an unknown dtype of queries";
    case 12: return a.kv_dtype = codes({0, 1, 2, 3}), "an unknown dtype of keys";
    case 13: return a.v_dtype = i8 ? codes({3, 4}) : codes({a.kv_dtype}), "values of another dtype";
    case 14: return a.compute = codes({0, 1, 2}), "an unknown precision";
    case 15: return a.bias ? (a.bias_dtype = codes({0, 1, 2}), "an unknown dtype of the bias") : nullptr;
    case 16: return i8 ? (a.scale_dtype = codes({ADA_F32, ADA_U8F}), "an unknown dtype of scales") : nullptr;
    case 17: return i8 ? (*any<const void **>({&a.k_scale, &a.v_scale}) = nullptr, "codes without scales") : nullptr;
    case 18: {
      if (!a.segments) return nullptr;
      int64_t *s = const_cast<int64_t *>(a.segments) + 6 * pick(0, a.n_segments - 1);
      const int64_t field = pick(0, 5);
      const int64_t limits[] = {a.batch, a.q_len, a.q_len, a.kv_len, a.kv_len, 0};
      s[field] = field == 5 ? any<int64_t>({far(), -far()}) : any<int64_t>({-1, limits[field] + 1, INT64_MAX, INT64_MIN});
      return "a segment outside";
    }
    case 19: return a.n_segments = any<int64_t>({-1, INT64_MIN}), "a negative number of segments";
    case 20: {
      int64_t *per_head = const_cast<int64_t *>(pick(0, 1) ? a.head_windows : a.head_sinks);
      return per_head ? (per_head[pick(0, a.kv_heads - 1)] = far(), "a head's distance beyond reason") : nullptr;
    }
    case 21: return a.head_sinks ? (const_cast<int64_t *>(a.head_sinks)[0] = -1, "a head's sinks below none") : nullptr;
    default: return backward ? (a.dout = nullptr, "no gradient to start from") : nullptr;
  }
}

// One change that is odd but has a meaning; it never lets a true call reach beyond its buffers.
void twist(Call &c) {
  ada_args &a = c.a;
  constexpr double NONE = std::numeric_limits<double>::quiet_NaN(), MOST = std::numeric_limits<double>::infinity();
  switch (pick(0, 10)) {
    case 0: a.scaling = any({NONE, MOST, -MOST, 0.0, -1.0, 1e300, 1e-300}); break;
    case 1: a.softcap = any({NONE, MOST, -MOST, -1.0, 1e-300, 1e300}); break;
    case 2: a.window = any<int64_t>({INT64_MIN, -5, 0, int64_t(1) << 40}); break;
    case 3: a.offset = any<int64_t>({-(int64_t(1) << 40), int64_t(1) << 40, -1000, 1000}); break;
    case 4: a.causal = any<int64_t>({7, -1, INT64_MIN}); break;
    case 5: a.rotated = any<int64_t>({-1, 99, INT64_MAX}); break;
    case 6: *any<int64_t *>({&a.q_len, &a.kv_len, &a.batch}) = 0, a.segments = nullptr; break;
    case 7: *any<void **>({&a.dq, &a.dk, &a.dv}) = nullptr; break;  // gradients that nobody wants
    case 8: std::memset(any<int64_t *>({a.qs, a.ks}), 0, 32); break;  // one number for all
    case 9: a.lse ? (void)(a.lse[0] = -0.0f) : (void)0, a.threads = INT64_MAX; break;
    default: a.n_segments = 0;
  }
}

bool one(int64_t seed) {
  rng.seed(static_cast<uint64_t>(seed));
  const bool backward = pick(0, 2) == 0, spoils = pick(0, 3) > 0;
  Call c;
  draw(c, backward);
  const size_t written = static_cast<size_t>(c.a.batch * c.a.q_heads * c.a.q_len * c.a.dim_v * size_of(c.a.q_dtype));
  char *out = static_cast<char *>(c.a.out);
  const char *what = nullptr;
  if (spoils)
    while (!(what = spoil(c, backward))) {
    }
  else twist(c);
  const int64_t status = backward ? ada_backward(&c.a) : ada_forward(&c.a);
  if (!spoils) return true;
  bool touched = false;
  for (size_t i = 0; i < written; ++i) touched |= out[i] != CANARY;
  if (status < 0 && !touched) return true;
  std::printf("case %lld, %s: %s was %s\n", static_cast<long long>(seed), backward ? "backward" : "forward", what,
              status < 0 ? "refused after writing" : "accepted");
  return false;
}

bool one_store(int64_t seed) {
  rng.seed(static_cast<uint64_t>(seed));
  Call c;
  ada_store_args s;
  std::memset(&s, 0, sizeof s);
  const bool four = pick(0, 1);
  s.batch = pick(1, 2), s.heads = pick(1, 3), s.n = pick(1, 70), s.dim = four ? 32 * pick(1, 2) : pick(1, 70);
  s.x_dtype = pick(0, 2), s.code_dtype = four ? ADA_I4 : ADA_I8, s.rotated = pick(0, 1);
  const int64_t rows = s.batch * s.heads * s.n, width = four ? s.dim / 2 : s.dim;
  char *codes_ = c.bytes(rows * width);
  std::memset(codes_, CANARY, static_cast<size_t>(rows * width));
  s.x = c.bytes(rows * s.dim * size_of(s.x_dtype), pick(0, 1)), s.codes = codes_;
  s.scale = reinterpret_cast<uint8_t *>(c.bytes(rows));
  if (pick(0, 1)) s.mean = c.numbers<float>(s.batch * s.heads * s.dim, [] { return 0.5f; });
  strides(s.xs, s.heads, s.n, s.dim), strides(s.cs, s.heads, s.n, width);
  s.ss[0] = s.heads * s.n, s.ss[1] = s.n, s.ss[2] = 1;
  s.threads = pick(1, 3);
  do s.level = pick(-1, ADA_AMX);
  while (s.level >= 0 && !ada_has_level(s.level));
  if (ada_store(&s)) {  // the bytes may mean any number, and none
    std::printf("case %lld, store: a valid call was refused\n", static_cast<long long>(seed));
    return false;
  }
  std::memset(codes_, CANARY, static_cast<size_t>(rows * width));
  const char *what = nullptr;
  switch (pick(0, 7)) {
    case 0: *any<int64_t *>({&s.batch, &s.heads, &s.n, &s.dim}) = any<int64_t>({-1, INT64_MIN}), what = "a negative extent"; break;
    case 1: *any<int64_t *>({&s.batch, &s.heads, &s.n, &s.dim}) = huge(), what = "an extent beyond memory"; break;
    case 2: s.dim = four ? 31 : 0, what = "channels that do not fit"; break;
    case 3: s.x_dtype = codes({0, 1, 2}), what = "an unknown dtype of tokens"; break;
    case 4: s.code_dtype = codes({3, 4}), what = "an unknown dtype of codes"; break;
    case 5: s.threads = any<int64_t>({0, -1}), what = "no threads"; break;
    case 6: pick(0, 2) ? (void)(pick(0, 1) ? (void)(s.x = nullptr) : (void)(s.codes = nullptr)) : (void)(s.scale = nullptr), what = "a null tensor"; break;
    default: s.level = any<int64_t>({ADA_AMX + 1, 77}), what = "an unknown level";
  }
  const int64_t status = ada_store(&s);
  bool touched = false;
  for (int64_t i = 0; i < rows * width; ++i) touched |= codes_[i] != CANARY;
  if (status < 0 && !touched) return true;
  std::printf("case %lld, store: %s was %s\n", static_cast<long long>(seed), what, status < 0 ? "refused after writing" : "accepted");
  return false;
}

}  // namespace

int main(int argc, char **argv) {
  const int64_t first = argc > 1 ? std::atoll(argv[1]) : 0, cases = argc > 2 ? std::atoll(argv[2]) : 100;
  int64_t bad = 0;
  for (int64_t i = 0; i < cases; ++i) bad += !(i % 5 ? one(first + i) : one_store(first + i));
  std::printf("%lld malformed cases, %lld wrong\n", static_cast<long long>(cases), static_cast<long long>(bad));
  return bad ? 1 : 0;
}
