// Random extents, strides and rules through the C interface, against double precision written out plainly. Buffers are
// allocated to the byte, so that a sanitizer sees every access beyond them. Usage: fuzz SEED CASES
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "adaattn.h"

namespace {

std::mt19937_64 rng;
int64_t pick(int64_t lo, int64_t hi) { return lo + static_cast<int64_t>(rng() % static_cast<uint64_t>(hi - lo + 1)); }
float normal() { return std::normal_distribution<float>()(rng); }

uint16_t bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float unbf16(uint16_t h) {
  uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// [batch, heads, len, dim] in one of three memory orders, with gaps between rows now and then
struct Tensor {
  int64_t shape[4], stride[4];
  bool half;
  char *data;
  std::vector<float> values;  // what the bytes mean, in index order
  Tensor(int64_t b, int64_t h, int64_t l, int64_t d, bool is_half) : shape{b, h, l, d}, half(is_half) {
    static const int orders[3][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {0, 1, 3, 2}};
    const int *order = orders[pick(0, 2)];
    int64_t step = 1, gap = pick(0, 3) ? 0 : pick(1, 5);
    for (int i = 3; i >= 0; --i) {
      stride[order[i]] = step;
      step *= shape[order[i]];
      if (i == 3) step += gap;
    }
    int64_t last = 0;
    bool empty = false;
    for (int i = 0; i < 4; ++i) {
      last += (shape[i] - 1) * stride[i];
      empty |= shape[i] == 0;
    }
    const size_t bytes = empty ? 1 : static_cast<size_t>(last + 1) * (half ? 2 : 4);
    data = static_cast<char *>(std::malloc(bytes));
    std::memset(data, 0, bytes);
    values.resize(static_cast<size_t>(b * h * l * d));
  }
  Tensor(const Tensor &) = delete;
  ~Tensor() { std::free(data); }
  int64_t at(int64_t b, int64_t h, int64_t l, int64_t d) const {
    return b * stride[0] + h * stride[1] + l * stride[2] + d * stride[3];
  }
  float get(int64_t b, int64_t h, int64_t l, int64_t d) const {
    const int64_t i = at(b, h, l, d);
    return half ? unbf16(reinterpret_cast<uint16_t *>(data)[i]) : reinterpret_cast<float *>(data)[i];
  }
  // The bytes of an int8 copy in the same layout; the values become what these mean, in units of STEP.
  static constexpr float STEP = 1.0f / 32;
  std::vector<int8_t> rounded() {
    int64_t last = 0;
    for (int i = 0; i < 4; ++i) last += (shape[i] - 1) * stride[i];
    std::vector<int8_t> made(static_cast<size_t>(last + 1));
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t h = 0; h < shape[1]; ++h)
        for (int64_t l = 0; l < shape[2]; ++l)
          for (int64_t d = 0; d < shape[3]; ++d) {
            const float x = std::fmax(-127.0f, std::fmin(127.0f, std::nearbyint(get(b, h, l, d) / STEP)));
            made[static_cast<size_t>(at(b, h, l, d))] = static_cast<int8_t>(x);
            put(b, h, l, d, x * STEP);
          }
    return made;
  }
  void put(int64_t b, int64_t h, int64_t l, int64_t d, float x) {
    if (half) reinterpret_cast<uint16_t *>(data)[at(b, h, l, d)] = bf16(x);
    else reinterpret_cast<float *>(data)[at(b, h, l, d)] = x;
  }
  void fill(float scale) {
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t h = 0; h < shape[1]; ++h)
        for (int64_t l = 0; l < shape[2]; ++l)
          for (int64_t d = 0; d < shape[3]; ++d) put(b, h, l, d, normal() * scale);
  }
};

int64_t level;  // of the present case

bool close(double got, double want, double tolerance, const char *what, int64_t seed) {
  if (std::fabs(got - want) <= tolerance || (std::isinf(want) && got == want)) return true;
  std::printf("case %lld, level %lld: %s is %g, expected %g (tolerance %g)\n", static_cast<long long>(seed),
              static_cast<long long>(level), what, got, want, tolerance);
  return false;
}

bool one(int64_t seed) {
  rng.seed(static_cast<uint64_t>(seed));
  const bool half = pick(0, 1), large = pick(0, 9) == 0;
  const int64_t batch = pick(1, 2), kv_heads = pick(1, 2), group = pick(1, 3), heads = kv_heads * group;
  const int64_t q_len = pick(0, 4) ? pick(1, 40) : pick(1, large ? 700 : 90);
  const int64_t kv_len = pick(0, 4) ? pick(1, 60) : pick(1, large ? 1200 : 140);
  const int64_t dim = pick(1, 70), dim_v = pick(1, 70);
  Tensor q(batch, heads, q_len, dim, half), k(batch, kv_heads, kv_len, dim, half), v(batch, kv_heads, kv_len, dim_v, half);
  Tensor out(batch, heads, q_len, dim_v, half), grad(batch, heads, q_len, dim_v, half);
  Tensor dq(batch, heads, q_len, dim, half), dk(batch, kv_heads, kv_len, dim, half), dv(batch, kv_heads, kv_len, dim_v, half);
  const float query_scale = pick(0, 9) ? 1.0f : 20.0f;
  q.fill(query_scale);
  k.fill(1.0f);
  v.fill(1.0f);
  grad.fill(1.0f);
  std::vector<float> lse(static_cast<size_t>(batch * heads * q_len)), sinks(static_cast<size_t>(heads));
  std::vector<int64_t> table;
  ada_args a;
  std::memset(&a, 0, sizeof a);
  a.q = q.data, a.k = k.data, a.v = v.data, a.out = out.data, a.lse = lse.data();
  a.q_dtype = a.kv_dtype = a.v_dtype = half ? ADA_BF16 : ADA_F32;
  a.batch = batch, a.q_heads = heads, a.kv_heads = kv_heads, a.q_len = q_len, a.kv_len = kv_len, a.dim = dim, a.dim_v = dim_v;
  std::memcpy(a.qs, q.stride, 32), std::memcpy(a.ks, k.stride, 32), std::memcpy(a.vs, v.stride, 32);
  std::memcpy(a.os, out.stride, 32), std::memcpy(a.gs, grad.stride, 32);
  std::memcpy(a.dqs, dq.stride, 32), std::memcpy(a.dks, dk.stride, 32), std::memcpy(a.dvs, dv.stride, 32);
  a.scaling = 1.0 / std::sqrt(static_cast<double>(dim));
  a.threads = 1;
  do a.level = pick(0, ADA_AMX);
  while (!ada_has_level(a.level));
  level = a.level;
  a.causal = pick(0, 1);
  a.window = pick(0, 2) ? -1 : pick(1, 40);
  a.sinks = pick(0, 1) ? 0 : pick(1, 5);
  a.offset = pick(0, 3) ? kv_len - q_len : pick(-5, 5);
  a.softcap = pick(0, 5) ? 0.0 : 3.0;
  if (!pick(0, 4)) {
    for (float &s : sinks) s = normal();
    a.sink_logits = sinks.data();
  }
  if (!pick(0, 2)) {  // disjoint segments with rows and keys between them that belong to none
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0, j = 0; i < q_len && j < kv_len;) {
        const int64_t n = pick(1, q_len - i), m = pick(1, kv_len - j);
        const int64_t row[6] = {b, i, n, j, m, pick(0, 1) ? m - n : pick(-3, 3)};
        table.insert(table.end(), row, row + 6);
        i += n + pick(0, 2), j += m + pick(0, 2);
      }
    a.segments = table.data();
    a.n_segments = static_cast<int64_t>(table.size() / 6);
  } else {
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t row[6] = {b, 0, q_len, 0, kv_len, a.offset};
      table.insert(table.end(), row, row + 6);
    }
  }
  std::vector<uint8_t> mask;
  if (!pick(0, 4)) {
    mask.resize(static_cast<size_t>(batch * kv_len));
    for (auto &m : mask) m = pick(0, 3) > 0;
    a.mask = mask.data();
    a.ms[0] = kv_len, a.ms[3] = 1;
  }
  // keys and values in int8, or products of them, where the level has such; without a backward
  std::vector<int8_t> k8, v8;
  std::vector<float> scales;
  std::vector<float> mean;
  const int64_t bytes = pick(0, 4);
  if (bytes == 0) {
    k8 = k.rounded(), v8 = v.rounded();
    scales.assign(static_cast<size_t>(batch * kv_heads * kv_len), Tensor::STEP);
    a.kv_dtype = a.v_dtype = ADA_I8, a.k = k8.data(), a.v = v8.data();
    a.k_scale = a.v_scale = scales.data();
    a.kss[0] = a.vss[0] = kv_heads * kv_len, a.kss[1] = a.vss[1] = kv_len, a.kss[2] = a.vss[2] = 1;
  } else if (bytes == 1 && (a.level == ADA_AVX512_BF16 || a.level == ADA_AMX)) {
    a.compute = ADA_COMPUTE_I8;
    if (pick(0, 1)) {
      mean.resize(static_cast<size_t>(kv_heads * dim));
      for (float &x : mean) x = normal();
      a.key_mean = mean.data();
    }
  }
  const bool differentiable = bytes > 0 && a.compute == ADA_EXACT;
  int64_t status = ada_forward(&a);
  if (status) {
    std::printf("case %lld: ada_forward returned %lld\n", static_cast<long long>(seed), static_cast<long long>(status));
    return false;
  }
  a.dout = grad.data, a.dq = dq.data, a.dk = dk.data, a.dv = dv.data;
  if ((ada_backward(&a) == 0) != differentiable) return false;

  std::vector<double> ek(k.values.size()), ev(v.values.size());
  std::vector<char> covered(lse.size());
  const bool coarse = a.compute == ADA_COMPUTE_I8;  // every logit is off by a percent, and so are the weights
  const double tol = coarse ? 0.08 * query_scale * query_scale : half ? 0.03 : query_scale > 1 ? 1e-4 : 3e-5;
  const double lse_tol = coarse ? 2 * tol : 2e-4 * query_scale;
  bool good = true;
  double top_k = 1, top_v = 1;
  for (size_t s = 0; s < table.size(); s += 6) {
    const int64_t b = table[s], q0 = table[s + 1], qn = table[s + 2], k0 = table[s + 3], kn = table[s + 4];
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < qn; ++i) {
        const int64_t p = i + table[s + 5], g = h / group;
        std::vector<double> w(static_cast<size_t>(kn), -INFINITY), slope(static_cast<size_t>(kn), 1.0);
        double top = -INFINITY;
        bool any = false;
        for (int64_t j = 0; j < kn; ++j) {
          bool see = !a.causal || j <= p;
          if (a.window >= 0) see = see && (j < a.sinks || (p - j < a.window && (a.causal || j - p < a.window)));
          if (a.mask) see = see && mask[static_cast<size_t>(b * kv_len + k0 + j)];
          if (!see) continue;
          double x = 0;
          for (int64_t d = 0; d < dim; ++d) x += static_cast<double>(q.get(b, h, q0 + i, d)) * k.get(b, g, k0 + j, d);
          x *= a.scaling;
          if (a.softcap > 0) {
            const double t = std::tanh(x / a.softcap);
            x = a.softcap * t;
            slope[static_cast<size_t>(j)] = 1 - t * t;
          }
          w[static_cast<size_t>(j)] = x;
          top = std::fmax(top, x);
          any = true;
        }
        if (a.sink_logits) top = std::fmax(top, static_cast<double>(sinks[static_cast<size_t>(h)]));
        double sum = a.sink_logits ? std::exp(sinks[static_cast<size_t>(h)] - top) : 0.0;
        for (double x : w) sum += any ? std::exp(x - top) : 0.0;
        const size_t at = static_cast<size_t>((b * heads + h) * q_len + q0 + i);
        covered[at] = 1;
        good &= close(lse[at], any || a.sink_logits ? top + std::log(sum) : -INFINITY, lse_tol, "lse", seed);
        std::vector<double> o(static_cast<size_t>(dim_v)), dp(static_cast<size_t>(kn));
        for (int64_t j = 0; j < kn; ++j) {
          double &x = w[static_cast<size_t>(j)];
          x = any ? std::exp(x - top) / sum : 0.0;
          for (int64_t d = 0; d < dim_v; ++d) {
            o[static_cast<size_t>(d)] += x * v.get(b, g, k0 + j, d);
            dp[static_cast<size_t>(j)] += static_cast<double>(grad.get(b, h, q0 + i, d)) * v.get(b, g, k0 + j, d);
          }
        }
        double delta = 0;
        for (int64_t d = 0; d < dim_v; ++d) {
          good &= close(out.get(b, h, q0 + i, d), o[static_cast<size_t>(d)], tol, "out", seed);
          delta += o[static_cast<size_t>(d)] * grad.get(b, h, q0 + i, d);
        }
        if (!differentiable) continue;
        std::vector<double> eq(static_cast<size_t>(dim));
        for (int64_t j = 0; j < kn; ++j) {
          const double x = w[static_cast<size_t>(j)], ds = x * (dp[static_cast<size_t>(j)] - delta) * slope[static_cast<size_t>(j)] * a.scaling;
          for (int64_t d = 0; d < dim; ++d) {
            eq[static_cast<size_t>(d)] += ds * k.get(b, g, k0 + j, d);
            ek[static_cast<size_t>(((b * kv_heads + g) * kv_len + k0 + j) * dim + d)] += ds * q.get(b, h, q0 + i, d);
          }
          for (int64_t d = 0; d < dim_v; ++d)
            ev[static_cast<size_t>(((b * kv_heads + g) * kv_len + k0 + j) * dim_v + d)] += x * grad.get(b, h, q0 + i, d);
        }
        double top_q = 1;
        for (double x : eq) top_q = std::fmax(top_q, std::fabs(x));
        for (int64_t d = 0; d < dim; ++d)
          good &= close(dq.get(b, h, q0 + i, d), eq[static_cast<size_t>(d)], 3 * tol * top_q, "dq", seed);
      }
  }
  for (double x : ek) top_k = std::fmax(top_k, std::fabs(x));
  for (double x : ev) top_v = std::fmax(top_v, std::fabs(x));
  for (int64_t b = 0; differentiable && b < batch; ++b)
    for (int64_t g = 0; g < kv_heads; ++g)
      for (int64_t j = 0; j < kv_len; ++j) {
        const size_t at = static_cast<size_t>((b * kv_heads + g) * kv_len + j);
        for (int64_t d = 0; d < dim; ++d)
          good &= close(dk.get(b, g, j, d), ek[at * static_cast<size_t>(dim) + static_cast<size_t>(d)], 3 * tol * top_k * (half ? query_scale : 1), "dk", seed);
        for (int64_t d = 0; d < dim_v; ++d)
          good &= close(dv.get(b, g, j, d), ev[at * static_cast<size_t>(dim_v) + static_cast<size_t>(d)], 3 * tol * top_v, "dv", seed);
      }
  for (size_t i = 0; i < covered.size(); ++i)
    if (!covered[i]) good &= close(lse[i], a.sink_logits ? sinks[i / static_cast<size_t>(q_len) % static_cast<size_t>(heads)] : -INFINITY, 1e-6, "lse of no segment", seed);
  return good;
}

// What a cache's one-byte scale stands for, and rows of `dim` numbers turned by the blocks of a Hadamard matrix.
double one_byte(uint8_t code) {
  const uint32_t u = (static_cast<uint32_t>(code) << 20) + (107u << 23);
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
void turn(std::vector<double> &x, int64_t dim) {
  const int64_t block = dim & -dim;
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(dim))
    for (int64_t b = 0; b < dim; b += block)
      for (int64_t step = 1; step < block; step *= 2)
        for (int64_t i = 0; i < block; ++i)
          if (!(i & step)) {
            double &lo = x[row + static_cast<size_t>(b + i)], &hi = x[row + static_cast<size_t>(b + i + step)];
            const double sum = (lo + hi) / std::sqrt(2.0), difference = (lo - hi) / std::sqrt(2.0);
            lo = sum, hi = difference;
          }
}

// Tokens as a cache stores them: codes of eight or four bits, and a scale of one byte for each token and head.
struct Codes {
  int64_t bits, width;  // bytes per token
  std::vector<uint8_t> data, scale;
  std::vector<double> values;  // what they mean, still turned
  Codes(const Tensor &x, int64_t bits_, const float *mean, bool rotated) : bits(bits_), width(x.shape[3] * bits_ / 8) {
    const int64_t rows = x.shape[0] * x.shape[1] * x.shape[2], dim = x.shape[3];
    data.resize(static_cast<size_t>(rows * width)), scale.resize(static_cast<size_t>(rows)), values.resize(x.values.size());
    ada_store_args s;
    std::memset(&s, 0, sizeof s);
    s.x = x.data, s.codes = data.data(), s.scale = scale.data(), s.mean = mean;
    s.x_dtype = x.half ? ADA_BF16 : ADA_F32, s.code_dtype = bits == 4 ? ADA_I4 : ADA_I8, s.rotated = rotated;
    s.batch = x.shape[0], s.heads = x.shape[1], s.n = x.shape[2], s.dim = dim;
    std::memcpy(s.xs, x.stride, 32);
    strides(s.cs, x), s.cs[3] = 1;
    s.ss[0] = x.shape[1] * x.shape[2], s.ss[1] = x.shape[2], s.ss[2] = 1;
    s.threads = pick(1, 2), s.level = level;
    status = ada_store(&s);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t d = 0; d < dim; ++d) {
        const uint8_t byte = data[static_cast<size_t>(row * width + (bits == 4 ? d / 32 * 16 + d % 16 : d))];
        const int code = bits == 4 ? 2 * ((d % 32 < 16 ? byte : byte >> 4) & 15) - 15 : static_cast<int8_t>(byte);
        values[static_cast<size_t>(row * dim + d)] = code * one_byte(scale[static_cast<size_t>(row)]);
      }
  }
  void strides(int64_t *to, const Tensor &x) const {
    to[0] = x.shape[1] * x.shape[2] * width, to[1] = x.shape[2] * width, to[2] = width, to[3] = 1;
  }
  int64_t status;
};

// A cache of random tokens is written and read: int8, or int8 keys with values of four bits; turned, smoothed or neither.
bool stored(int64_t seed) {
  rng.seed(static_cast<uint64_t>(seed) ^ 0x9e3779b97f4a7c15ull);
  const bool half = pick(0, 1), rotated = pick(0, 1), four = pick(0, 1);
  const int64_t batch = pick(1, 2), kv_heads = pick(1, 3), group = pick(1, 4), heads = kv_heads * group;
  const int64_t q_len = pick(0, 2) ? 1 : pick(2, 40), kv_len = pick(0, 4) ? pick(1, 100) : pick(100, 2000);
  const int64_t dim = pick(0, 1) ? 32 * pick(1, 4) : pick(1, 70), dim_v = four ? 32 * pick(1, 4) : pick(0, 1) ? dim : pick(1, 70);
  Tensor q(batch, heads, q_len, dim, half), k(batch, kv_heads, kv_len, dim, half), v(batch, kv_heads, kv_len, dim_v, half);
  Tensor out(batch, heads, q_len, dim_v, half);
  q.fill(1.0f), k.fill(1.0f), v.fill(1.0f);
  do level = pick(0, ADA_AMX);
  while (!ada_has_level(level));
  std::vector<float> mean, first, lse(static_cast<size_t>(batch * heads * q_len));
  if (pick(0, 1)) {
    mean.resize(static_cast<size_t>(batch * kv_heads * dim));
    for (float &x : mean) x = normal();
  }
  Codes ck(k, 8, mean.empty() ? nullptr : mean.data(), rotated), cv(v, four ? 4 : 8, nullptr, rotated);
  if (ck.status || cv.status) {
    std::printf("case %lld: ada_store returned %lld, %lld\n", static_cast<long long>(seed), static_cast<long long>(ck.status),
                static_cast<long long>(cv.status));
    return false;
  }
  std::vector<double> kn = ck.values, vn = cv.values;
  for (int64_t row = 0; !mean.empty() && row < batch * kv_heads * kv_len; ++row)
    for (int64_t d = 0; d < dim; ++d)
      kn[static_cast<size_t>(row * dim + d)] += mean[static_cast<size_t>(row / kv_len * dim + d)];
  if (rotated) turn(kn, dim), turn(vn, dim_v);
  bool good = true;
  for (int64_t row = 0; row < batch * kv_heads * kv_len; ++row) {  // a code is off by half a step at most, before turning
    double miss = 0, miss_v = 0;
    const int64_t b = row / (kv_heads * kv_len), h = row / kv_len % kv_heads, l = row % kv_len;
    for (int64_t d = 0; d < dim; ++d) miss += std::pow(kn[static_cast<size_t>(row * dim + d)] - k.get(b, h, l, d), 2);
    for (int64_t d = 0; d < dim_v; ++d) miss_v += std::pow(vn[static_cast<size_t>(row * dim_v + d)] - v.get(b, h, l, d), 2);
    const double step = one_byte(ck.scale[static_cast<size_t>(row)]), step_v = one_byte(cv.scale[static_cast<size_t>(row)]);
    good &= close(std::sqrt(miss), 0, 0.51 * step * std::sqrt(static_cast<double>(dim)) + 1e-5, "a stored key's error", seed);
    good &= close(std::sqrt(miss_v), 0, (four ? 1.01 : 0.51) * step_v * std::sqrt(static_cast<double>(dim_v)) + 1e-5, "a stored value's error", seed);
  }
  if (pick(0, 1)) {
    first.resize(static_cast<size_t>(batch * kv_heads * dim));
    for (int64_t i = 0; i < batch * kv_heads; ++i)
      for (int64_t d = 0; d < dim; ++d)
        kn[static_cast<size_t>(i * kv_len * dim + d)] = first[static_cast<size_t>(i * dim + d)] = normal();
  }
  std::vector<int64_t> windows(static_cast<size_t>(kv_heads)), sinks(static_cast<size_t>(kv_heads));
  for (int64_t &x : windows) x = pick(0, 1) ? -1 : pick(1, 90);
  for (int64_t &x : sinks) x = pick(0, 6);
  ada_args a;
  std::memset(&a, 0, sizeof a);
  a.q = q.data, a.k = ck.data.data(), a.v = cv.data.data(), a.out = out.data, a.lse = lse.data();
  a.q_dtype = half ? ADA_BF16 : ADA_F32, a.kv_dtype = ADA_I8, a.v_dtype = four ? ADA_I4 : ADA_I8;
  a.batch = batch, a.q_heads = heads, a.kv_heads = kv_heads, a.q_len = q_len, a.kv_len = kv_len, a.dim = dim, a.dim_v = dim_v;
  std::memcpy(a.qs, q.stride, 32), std::memcpy(a.os, out.stride, 32);
  ck.strides(a.ks, k), cv.strides(a.vs, v);
  a.k_scale = ck.scale.data(), a.v_scale = cv.scale.data(), a.scale_dtype = ADA_U8F;
  a.kss[0] = a.vss[0] = kv_heads * kv_len, a.kss[1] = a.vss[1] = kv_len, a.kss[2] = a.vss[2] = 1;
  a.rotated = rotated ? 3 : 0;
  a.first_key = first.empty() ? nullptr : first.data();
  a.key_mean = mean.empty() ? nullptr : mean.data(), a.key_mean_row = kv_heads * dim;
  a.window = -1, a.head_windows = windows.data(), a.head_sinks = sinks.data();
  a.scaling = 1.0 / std::sqrt(static_cast<double>(dim)), a.causal = 1, a.offset = kv_len - q_len;
  a.threads = pick(1, 2), a.level = level;
  const int64_t status = ada_forward(&a);
  if (status || !ada_backward(&a)) {
    std::printf("case %lld: ada_forward returned %lld\n", static_cast<long long>(seed), static_cast<long long>(status));
    return false;
  }
  const double tol = half ? 0.03 : 2e-4;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < q_len; ++i) {
        const int64_t g = h / group, p = i + a.offset, base = (b * kv_heads + g) * kv_len;
        std::vector<double> o(static_cast<size_t>(dim_v)), w(static_cast<size_t>(kv_len), -INFINITY);
        double top = -INFINITY, sum = 0;
        for (int64_t j = 0; j < kv_len && j <= p; ++j) {
          const int64_t window = windows[static_cast<size_t>(g)];
          if (window >= 0 && p - j >= window && j >= sinks[static_cast<size_t>(g)]) continue;
          double x = 0;
          for (int64_t d = 0; d < dim; ++d) x += q.get(b, h, i, d) * kn[static_cast<size_t>((base + j) * dim + d)];
          w[static_cast<size_t>(j)] = x * a.scaling;
          top = std::fmax(top, x * a.scaling);
        }
        for (double &x : w) sum += x = std::isinf(x) ? 0 : std::exp(x - top);
        for (int64_t j = 0; j < kv_len; ++j)
          for (int64_t d = 0; d < dim_v; ++d)
            o[static_cast<size_t>(d)] += w[static_cast<size_t>(j)] / sum * vn[static_cast<size_t>((base + j) * dim_v + d)];
        good &= close(lse[static_cast<size_t>((b * heads + h) * q_len + i)], sum > 0 ? top + std::log(sum) : -INFINITY,
                      half ? 0.03 : 2e-4, "lse over codes", seed);
        for (int64_t d = 0; d < dim_v; ++d)
          good &= close(out.get(b, h, i, d), sum > 0 ? o[static_cast<size_t>(d)] : 0, tol, "out over codes", seed);
      }
  return good;
}

}  // namespace

int main(int argc, char **argv) {
  const int64_t first = argc > 1 ? std::atoll(argv[1]) : 0, cases = argc > 2 ? std::atoll(argv[2]) : 100;
  int64_t bad = 0;
  for (int64_t i = 0; i < cases; ++i) bad += !one(first + i) + !stored(first + i);
  std::printf("%lld cases, %lld wrong\n", static_cast<long long>(cases), static_cast<long long>(bad));
  return bad ? 1 : 0;
}
