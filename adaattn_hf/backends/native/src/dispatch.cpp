// The C interface: checks, the table of units (segment x key/value head), threads, and the choice of instruction set.
#include <atomic>
#include <cstring>
#include <new>
#include "machine.hpp"

namespace {

struct Job {
  const ada_args *a;
  const AdaKernels *k;
  AdaShape shape;
  AdaUnit *units;
  int64_t n_units;
  int64_t pack_tasks, tasks;
  int64_t unit_bytes = 0;  // bytes that the largest unit asks of a thread
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> *packed;  // tiles done, per unit
  std::atomic<bool> failed{false};
};

// The last unit whose first task is not after `task`.
const AdaUnit &unit_of(const AdaUnit *units, int64_t n, int64_t task) {
  int64_t lo = 0, hi = n;
  while (hi - lo > 1) {
    int64_t mid = (lo + hi) / 2;
    (units[mid].first_task <= task ? lo : hi) = mid;
  }
  return units[lo];
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// One thread's share. Tasks are drawn from one counter, packing first: whoever waits for a packed unit waits only for
// threads that are at work on it, so it cannot wait for ever. Who computes a task does not change its result.
void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  char *scratch = t_scratch.get(static_cast<size_t>(job.shape.scratch));
  if (!scratch) {
    job.failed = true;
    return;
  }
  int64_t task;
  while ((task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.pack_tasks) {
    int64_t u = 0, first = 0;  // packing tasks are as many as key tiles, in the order of the units
    while (task >= first + job.units[u].tiles) first += job.units[u++].tiles;
    job.k->pack(*job.a, job.shape, job.units[u], task - first, scratch);
    job.packed[u].fetch_add(1, std::memory_order_release);
  }
  for (; task < job.pack_tasks + job.tasks; task = job.next.fetch_add(1, std::memory_order_relaxed)) {
    const AdaUnit &u = unit_of(job.units, job.n_units, task - job.pack_tasks);
    while (job.packed[&u - job.units].load(std::memory_order_acquire) < u.tiles) relax();
    job.k->forward(*job.a, job.shape, u, task - job.pack_tasks - u.first_task, scratch);
  }
  t_scratch.done();
}

// Whether all rows of a unit walk one packed tile before the next one is packed over it, their unfinished outputs lying in
// `out`: its packed keys and values then stay in the core's cache, and cost the memory of one tile.
bool tile_by_tile(const ada_args &a, const AdaShape &sh, const AdaUnit &u) {
  return sh.compute == ADA_F32 && a.q_dtype == ADA_F32 && a.out && a.os[3] == 1 && sh.dv == a.dim_v &&
         u.window < 0 && u.tiles > 2;
}

// Bytes in which a thread packs a unit, and keeps the state of its rows.
int64_t own_bytes(const ada_args &a, const AdaShape &sh, const AdaUnit &u) {
  return tile_by_tile(a, sh, u) ? u.tile_bytes + u.qn * sh.group * 8 : u.tiles * u.tile_bytes;
}

// The same where there are units enough for all threads: whoever packs a unit computes it, from its own cache, and packs
// the next one over it.
void work_units(void *data) {
  Job &job = *static_cast<Job *>(data);
  char *scratch = t_scratch.get(static_cast<size_t>(job.shape.scratch));
  char *pack = t_own.get(static_cast<size_t>(job.unit_bytes) + 64);
  if (!scratch || !pack) {
    job.failed = true;
    return;
  }
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.n_units;) {
    AdaUnit u = job.units[i];
    u.pack = pack;
    const bool single = tile_by_tile(*job.a, job.shape, u);
    if (single) u.state = reinterpret_cast<float *>(pack + u.tile_bytes);
    u.to = 0;
    do {
      u.from = u.to;
      u.to = single ? u.from + 1 : u.tiles;
      for (int64_t t = u.from; t < u.to; ++t) job.k->pack(*job.a, job.shape, u, t, scratch);
      for (int64_t t = 0; t < u.tasks; ++t) job.k->forward(*job.a, job.shape, u, t, scratch);
    } while (u.to < u.tiles);
  }
  t_scratch.done();
  t_own.done();
}

// The same for few query rows: tasks are parts of the keys of a unit, and whoever finishes the last part of a unit puts
// its parts together.
void work_few(void *data) {
  Job &job = *static_cast<Job *>(data);
  char *scratch = t_scratch.get(static_cast<size_t>(job.shape.scratch));
  if (!scratch) {
    job.failed = true;
    return;
  }
  for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;) {
    const AdaUnit &u = unit_of(job.units, job.n_units, task);
    job.k->decode(*job.a, job.shape, u, task - u.first_task, scratch);
    if (u.splits > 1 && job.packed[&u - job.units].fetch_add(1, std::memory_order_acq_rel) == u.splits - 1)
      job.k->merge(*job.a, job.shape, u, scratch);
  }
  t_scratch.done();
}

void work_backward(void *data) {
  Job &job = *static_cast<Job *>(data);
  char *scratch = t_scratch.get(static_cast<size_t>(job.shape.scratch));
  if (!scratch) {
    job.failed = true;
    return;
  }
  for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;)
    job.k->backward(*job.a, job.shape, job.units[task], scratch);
  t_scratch.done();
}

struct StoreJob {
  const ada_store_args *a;
  const AdaKernels *k;
  int64_t rows;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
};
constexpr int64_t STORE_ROWS = 64;  // rows that a thread draws at a time

void work_store(void *data) {
  StoreJob &job = *static_cast<StoreJob *>(data);
  float *scratch = reinterpret_cast<float *>(t_scratch.get(static_cast<size_t>(job.a->dim) * 4));
  if (!scratch) {
    job.failed = true;
    return;
  }
  for (int64_t at; (at = job.next.fetch_add(STORE_ROWS, std::memory_order_relaxed)) < job.rows;)
    for (int64_t row = at; row < at + STORE_ROWS && row < job.rows; ++row) job.k->store(*job.a, row, scratch);
  t_scratch.done();
}

void run(Job &job, void (*fn)(void *), int64_t tasks, double flops) {
  int64_t threads = job.a->threads < tasks ? job.a->threads : tasks;
  if (g_parallel && threads > 1 && flops > 2e6) g_parallel(fn, &job, static_cast<unsigned>(threads), 0);
  else fn(&job);
}

int64_t segment_field(const ada_args &a, int64_t s, int f) {
  if (a.segments) return a.segments[s * 6 + f];
  const int64_t trivial[6] = {s, 0, a.q_len, 0, a.kv_len, a.offset};
  return trivial[f];
}

// Whether the product of extents, each at most 2^32, leaves room for a few bytes an element in 63 bits.
bool countable(int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t extents[] = {a, b, c, d};
  int64_t product = 64;
  for (int64_t extent : extents)
    if (extent > (int64_t(1) << 32) || __builtin_mul_overflow(product, extent > 0 ? extent : 1, &product)) return false;
  return true;
}

int64_t check(const ada_args &a) {
  if (a.batch < 0 || a.q_heads < 1 || a.kv_heads < 1 || a.q_heads % a.kv_heads || a.q_len < 0 || a.kv_len < 0) return -1;
  if (a.dim < 1 || a.dim_v < 1 || a.threads < 1 || a.n_segments < 0) return -1;
  constexpr int64_t FAR = int64_t(1) << 40;  // windows and offsets beyond any extent, whose sums do not overflow
  if (!countable(a.batch, a.q_heads, a.q_len, a.dim) || !countable(a.batch, a.kv_heads, a.kv_len, a.dim)) return -1;
  if (!countable(a.batch, a.q_heads, a.q_len, a.kv_len) || !countable(a.batch, a.q_heads, a.kv_len, a.dim_v)) return -1;
  if (a.offset > FAR || a.offset < -FAR || a.window > FAR || a.sinks > FAR || a.sinks < 0) return -1;
  if (!a.out && !a.lse) return -1;
  if (a.batch && ((a.q_len && !a.q) || (a.kv_len && (!a.k || !a.v)))) return -1;
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    if (a.head_windows && a.head_windows[h] > FAR) return -1;
    if (a.head_sinks && (a.head_sinks[h] > FAR || a.head_sinks[h] < 0)) return -1;
  }
  if (a.bias && (a.bias_dtype < ADA_F32 || a.bias_dtype > ADA_F16)) return -1;
  if (a.compute < ADA_EXACT || a.compute > ADA_COMPUTE_I8) return -1;
  if (a.kv_dtype == ADA_I8 && (!a.k_scale || !a.v_scale || a.compute == ADA_COMPUTE_I8)) return -1;
  if (a.kv_dtype == ADA_I8 && a.scale_dtype != ADA_F32 && a.scale_dtype != ADA_U8F) return -1;
  if (a.v_dtype != a.kv_dtype && (a.v_dtype != ADA_I4 || a.kv_dtype != ADA_I8 || a.dim_v % 32 || a.vs[3] != 1)) return -1;
  if (a.q_dtype < ADA_F32 || a.q_dtype > ADA_F16 || a.kv_dtype < ADA_F32 || a.kv_dtype > ADA_I8) return -1;
  for (int64_t s = 0; a.segments && s < a.n_segments; ++s) {
    const int64_t *g = a.segments + s * 6;
    if (g[0] < 0 || g[0] >= a.batch || g[1] < 0 || g[2] < 0 || g[1] > a.q_len - g[2]) return -1;
    if (g[3] < 0 || g[4] < 0 || g[3] > a.kv_len - g[4] || g[5] > FAR || g[5] < -FAR) return -1;
  }
  return 0;
}

// Query rows that belong to no segment: zero output, lse -inf (or the learned sink's).
void clear(const ada_args &a) {
  const size_t size = a.q_dtype == ADA_F32 ? 4 : 2;
  if (a.lse)
    for (int64_t i = 0, n = a.batch * a.q_heads * a.q_len; i < n; ++i)
      a.lse[i] = a.sink_logits ? a.sink_logits[i / a.q_len % a.q_heads] : -__builtin_inff();
  if (!a.out) return;
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.q_heads; ++h)
      for (int64_t i = 0; i < a.q_len; ++i) {
        char *o = static_cast<char *>(a.out) + static_cast<size_t>(b * a.os[0] + h * a.os[1] + i * a.os[2]) * size;
        if (a.os[3] == 1) std::memset(o, 0, static_cast<size_t>(a.dim_v) * size);
        else
          for (int64_t d = 0; d < a.dim_v; ++d) std::memset(o + static_cast<size_t>(d * a.os[3]) * size, 0, size);
      }
}

void fill_unit(const ada_args &a, const AdaShape &sh, AdaUnit &u, int64_t s, int64_t h) {
  std::memset(&u, 0, sizeof u);
  u.row = segment_field(a, s, 0);
  u.head = h;
  u.q0 = segment_field(a, s, 1);
  u.qn = segment_field(a, s, 2);
  u.k0 = segment_field(a, s, 3);
  u.kn = segment_field(a, s, 4);
  u.offset = segment_field(a, s, 5);
  const int64_t own = a.head_windows ? a.head_windows[h] : -1;
  const bool narrower = own >= 0 && (a.window < 0 || own < a.window);
  u.window = narrower ? own : a.window;
  u.sinks = narrower && a.window < 0 && a.head_sinks ? a.head_sinks[h] : a.sinks;
  if (a.causal) {  // keys after the last query are never seen
    int64_t last = u.qn + u.offset;
    u.kn = last < u.kn ? (last > 0 ? last : 0) : u.kn;
  }
  u.tiles = u.to = (u.kn + ADA_KEYS - 1) / ADA_KEYS;
  u.pitch = u.kn < ADA_KEYS ? (u.kn + 63) / 64 * 64 : ADA_KEYS;
  u.k_bytes = (u.pitch * sh.k_size + 63) / 64 * 64;
  u.tile_bytes = u.k_bytes + (u.pitch * sh.v_size + sh.extra + 63) / 64 * 64;
  int64_t per = 1;
  u.row_tiles = (u.qn + sh.rows - 1) / sh.rows;
  if (u.qn > 0 && u.qn * 2 <= sh.rows) per = sh.rows / u.qn;
  u.heads_per = per < sh.group ? per : sh.group;
  u.tasks = u.row_tiles * ((sh.group + u.heads_per - 1) / u.heads_per);
}

int64_t prepare(const ada_args &a, Job &job) {
  job.a = &a;
  job.k = kernels(a.level < 0 ? best_level() : a.level);
  if (!job.k) return -3;
  const bool halves = a.q_dtype == ADA_BF16 && (a.kv_dtype == ADA_BF16 || a.kv_dtype == ADA_I8);
  job.shape.compute = a.compute == ADA_COMPUTE_BF16 || halves ? ADA_BF16 : ADA_F32;
  if (a.compute == ADA_COMPUTE_I8) job.shape.compute = ADA_I8;
  job.k->shape(a, job.shape);
  return a.compute == ADA_COMPUTE_I8 && job.shape.compute != ADA_I8 ? -3 : 0;
}

// Whether a segment has few query rows, and keys and values that can be read where they lie. Each is asked for itself: what
// else is in the call must not decide which kernel computes it, whose rounding is another.
bool few(const ada_args &a, const Job &job, int64_t segment) {
  if (a.compute == ADA_COMPUTE_I8) return false;
  if (a.ks[3] != 1 || a.vs[3] != 1 || (a.kv_dtype == ADA_I8) != (a.k_scale && a.v_scale)) return false;
  return segment_field(a, segment, 2) * job.shape.group <= job.k->few;
}

// The segments of few query rows alone, `count` of all: what the others cost is no reason to wake threads here.
int64_t forward_few(const ada_args &a, Job &job, int64_t segments, int64_t count) {
  const int64_t total = count * a.kv_heads;
  char *table = t_units.get(static_cast<size_t>(total) * (sizeof(AdaUnit) + sizeof(std::atomic<int64_t>)) + 64);
  if (!table) return -2;
  job.units = reinterpret_cast<AdaUnit *>(table);
  job.packed = reinterpret_cast<std::atomic<int64_t> *>(table + static_cast<size_t>(total) * sizeof(AdaUnit));
  job.n_units = total;
  job.tasks = 0;
  job.shape.scratch = job.k->decode_scratch(a, job.shape);
  int64_t floats = 0;
  double flops = 0;
  // The number of parts depends on a unit's extents alone, never on threads or other segments: results must not.
  const int64_t wanted = (64 + a.kv_heads - 1) / a.kv_heads;
  for (int64_t i = 0, segment = -1; i < total; ++i) {
    if (i % a.kv_heads == 0)
      while (!few(a, job, ++segment)) {
      }
    AdaUnit &u = job.units[i];
    fill_unit(a, job.shape, u, segment, i % a.kv_heads);
    int64_t parts = u.kn / 512 < wanted ? u.kn / 512 : wanted;
    if (parts < 1) parts = 1;
    u.split = ((u.kn + parts - 1) / parts + ADA_KEYS - 1) / ADA_KEYS * ADA_KEYS;
    if (u.split < ADA_KEYS) u.split = ADA_KEYS;
    u.splits = u.kn ? (u.kn + u.split - 1) / u.split : 1;
    u.tasks = u.qn ? u.splits : 0;
    u.first_task = job.tasks;
    job.tasks += u.tasks;
    new (&job.packed[i]) std::atomic<int64_t>(0);
    if (!u.tasks) u.splits = 1;
    if (u.splits > 1) floats += u.splits * u.qn * job.shape.group * (a.dim_v + 2);
    flops += 2.0 * static_cast<double>(u.qn * job.shape.group + 4) * static_cast<double>(u.kn) *
             static_cast<double>(a.dim + a.dim_v);
  }
  float *partial = floats ? reinterpret_cast<float *>(t_pack.get(static_cast<size_t>(floats) * 4)) : nullptr;
  if (floats && !partial) return -2;
  for (int64_t i = 0; i < total; ++i) {
    AdaUnit &u = job.units[i];
    u.partial = partial;
    if (u.splits > 1) partial += u.splits * u.qn * job.shape.group * (a.dim_v + 2);
  }
  run(job, work_few, job.tasks, flops);
  t_pack.done();
  t_units.done();
  return job.failed ? -2 : 0;
}

}  // namespace

#define ADA_EXPORT extern "C" __attribute__((visibility("default")))

ADA_EXPORT int64_t ada_abi_version(void) { return ADA_ABI_VERSION; }
ADA_EXPORT int64_t ada_args_size(void) { return static_cast<int64_t>(sizeof(ada_args)); }
ADA_EXPORT int64_t ada_best_level(void) { return best_level(); }
ADA_EXPORT int64_t ada_has_level(int64_t level) { return kernels(level) != nullptr; }
// The most bytes that calls have worked with at a time beside their arguments; a reset counts anew from what is in use.
ADA_EXPORT int64_t ada_peak_bytes(int64_t reset) {
  if (reset) g_peak = g_used.load();
  return g_peak.load();
}
ADA_EXPORT void ada_set_parallel(ada_parallel_fn fn) { g_parallel = fn; }

ADA_EXPORT int64_t ada_forward(const ada_args *args) {
  const ada_args &a = *args;
  if (check(a)) return -1;
  Job job;
  if (const int64_t error = prepare(a, job)) return error;
  const int64_t segments = a.segments ? a.n_segments : a.batch;
  int64_t covered = 0;
  for (int64_t s = 0; s < segments; ++s) covered += segment_field(a, s, 2);
  if (covered < a.batch * a.q_len) clear(a);
  int64_t short_ones = 0;
  for (int64_t s = 0; s < segments; ++s) short_ones += few(a, job, s);
  if (short_ones || !segments) {
    const AdaShape shape = job.shape;
    const int64_t error = forward_few(a, job, segments, short_ones);
    if (error || short_ones == segments) return error;
    job.shape = shape;
  }
  // Units go through in waves, so that the packed copy stays within bounds however long the context is.
  const int64_t total = segments * a.kv_heads;
  int64_t at = 0;
  while (at < total) {
    int64_t count = 0, bytes = 0;
    for (int64_t i = at; i < total; ++i, ++count) {
      if (few(a, job, i / a.kv_heads)) continue;  // computed above
      AdaUnit u;
      fill_unit(a, job.shape, u, i / a.kv_heads, i % a.kv_heads);
      if (count && bytes + u.tiles * u.tile_bytes > static_cast<int64_t>(KEEP)) break;
      bytes += u.tiles * u.tile_bytes;
    }
    char *table = t_units.get(static_cast<size_t>(count) * (sizeof(AdaUnit) + sizeof(std::atomic<int64_t>)) + 64);
    if (!table) return -2;
    job.units = reinterpret_cast<AdaUnit *>(table);
    job.packed = reinterpret_cast<std::atomic<int64_t> *>(table + static_cast<size_t>(count) * sizeof(AdaUnit));
    job.n_units = job.tasks = job.pack_tasks = job.unit_bytes = 0;
    job.next = 0;
    double flops = 0, largest = 0;
    int64_t most_rows = 0;
    for (int64_t i = at; i < at + count; ++i) {
      if (few(a, job, i / a.kv_heads)) continue;
      AdaUnit &u = job.units[job.n_units];
      fill_unit(a, job.shape, u, i / a.kv_heads, i % a.kv_heads);
      if (own_bytes(a, job.shape, u) > job.unit_bytes) job.unit_bytes = own_bytes(a, job.shape, u);
      u.first_task = job.tasks;
      job.tasks += u.tasks;
      job.pack_tasks += u.tiles;
      new (&job.packed[job.n_units++]) std::atomic<int64_t>(0);
      const double own = 2.0 * static_cast<double>(u.qn * job.shape.group) * static_cast<double>(u.kn) *
                         static_cast<double>(a.dim + a.dim_v);
      flops += own;
      if (own > largest) largest = own;
      if (u.qn * job.shape.group > most_rows) most_rows = u.qn * job.shape.group;
    }
    // Keys that another core packed are slow to read; sharing them pays only where whole units would leave a core idle
    // for long and have rows enough to make up for it.
    const bool even = job.n_units % a.threads == 0 && largest * static_cast<double>(job.n_units) <= 1.01 * flops;
    if (even || largest * 2.0 * static_cast<double>(a.threads) <= flops || most_rows <= 80) {
      run(job, work_units, job.n_units, flops);
    } else {
      char *pack = t_pack.get(static_cast<size_t>(bytes) + 64);
      if (!pack) return -2;
      for (int64_t i = 0; i < job.n_units; ++i) {
        job.units[i].pack = pack;
        pack += job.units[i].tiles * job.units[i].tile_bytes;
      }
      run(job, work, job.tasks + job.pack_tasks, flops);
      t_pack.done();
    }
    if (job.failed) return -2;
    at += count;
  }
  t_units.done();
  return 0;
}

ADA_EXPORT int64_t ada_backward(const ada_args *args) {
  const ada_args &a = *args;
  if (check(a) || a.kv_dtype == ADA_I8 || a.compute == ADA_COMPUTE_I8 || !a.lse || !a.out || !a.dout) return -1;
  Job job;
  if (const int64_t error = prepare(a, job)) return error;
  const int64_t segments = a.segments ? a.n_segments : a.batch;
  job.n_units = job.tasks = segments * a.kv_heads;
  job.units = reinterpret_cast<AdaUnit *>(t_units.get(static_cast<size_t>(job.tasks) * sizeof(AdaUnit) + 64));
  if (!job.units) return -2;
  int64_t q_len = 0, kv_len = 0;
  double flops = 0;
  for (int64_t i = 0; i < job.tasks; ++i) {
    AdaUnit &u = job.units[i];
    fill_unit(a, job.shape, u, i / a.kv_heads, i % a.kv_heads);
    q_len = u.qn > q_len ? u.qn : q_len;
    kv_len = u.kn > kv_len ? u.kn : kv_len;
    flops += 5.0 * static_cast<double>(u.qn * job.shape.group) * static_cast<double>(u.kn * (a.dim + a.dim_v));
  }
  job.shape.scratch = job.k->backward_scratch(a, job.shape, q_len, kv_len);
  run(job, work_backward, job.tasks, flops);
  t_units.done();
  return job.failed ? -2 : 0;
}

ADA_EXPORT int64_t ada_store_size(void) { return static_cast<int64_t>(sizeof(ada_store_args)); }

ADA_EXPORT int64_t ada_store(const ada_store_args *args) {
  const ada_store_args &a = *args;
  if (a.batch < 0 || a.heads < 0 || a.n < 0 || a.dim < 1 || a.threads < 1) return -1;
  if (!countable(a.batch, a.heads, a.n, a.dim)) return -1;
  if (a.batch && a.heads && a.n && (!a.x || !a.codes || !a.scale)) return -1;
  if (a.x_dtype < ADA_F32 || a.x_dtype > ADA_F16) return -1;
  if (a.code_dtype != ADA_I8 && (a.code_dtype != ADA_I4 || a.dim % 32)) return -1;
  StoreJob job;
  job.a = &a;
  job.k = kernels(a.level < 0 ? best_level() : a.level);
  if (!job.k) return -3;
  job.rows = a.batch * a.heads * a.n;
  const int64_t parts = (job.rows + STORE_ROWS - 1) / STORE_ROWS, threads = a.threads < parts ? a.threads : parts;
  if (g_parallel && threads > 1 && job.rows * a.dim > (1 << 16))
    g_parallel(work_store, &job, static_cast<unsigned>(threads), 0);
  else work_store(&job);
  return job.failed ? -2 : 0;
}
