// The hardware's limit for an all-reduce among processes of one node, without any library around it.
//
// bare_all_reduce is the two-shot loop over mapped buffers: all ranks meet, rank r sums slice r of every rank's buffer
// and writes the sum to all of them, all meet again. bare_memcpy copies as many private bytes: a rank of the two-shot
// loop, too, reads n bytes and writes n bytes, whatever the number of ranks, so no all-reduce moves less than a copy.
// Both time their calls one by one; neither checks for errors that a benchmark cannot cause.
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, MAX_RANKS = 128, BLOCK = 4096, SPINS_BEFORE_YIELD = 4096 };

// Alone on its cache line. The owner stores with release: what it wrote before is visible to who loads with acquire.
typedef struct {
  _Alignas(LINE) atomic_uint_fast64_t arrived;
} Flag;

static Flag *flags;
static char *buffers;  // rank r's begins at buffers + r * buffer_bytes
static size_t buffer_bytes;
static int ranks, rank;
static uint_fast64_t generation;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void barrier(void) {
  ++generation;
  atomic_store_explicit(&flags[rank].arrived, generation, memory_order_release);
  for (int r = 0; r < ranks; ++r) {
    // With more ranks than cores, the one we wait for may need ours.
    for (int spins = 0; atomic_load_explicit(&flags[r].arrived, memory_order_acquire) < generation; ++spins)
      if (spins >= SPINS_BEFORE_YIELD) sched_yield();
  }
}

// Sums elements [begin, end) of every buffer, in rank order, and writes the sum to every buffer. Two ranks, the usual
// case, in one pass of two reads and two writes; more of them block by block, the sum staying in the first cache.
#define DEFINE_REDUCE(NAME, T)                                                            \
  static void NAME(size_t offset, size_t begin, size_t end) {                             \
    if (ranks == 2) {                                                                     \
      T *restrict a = (T *)(buffers + offset);                                            \
      T *restrict b = (T *)(buffers + buffer_bytes + offset);                             \
      for (size_t i = begin; i < end; ++i) a[i] = b[i] = (T)(a[i] + b[i]);                \
      return;                                                                             \
    }                                                                                     \
    T sum[BLOCK / sizeof(T)];                                                             \
    for (size_t at = begin; at < end; at += BLOCK / sizeof(T)) {                          \
      size_t count = end - at < BLOCK / sizeof(T) ? end - at : BLOCK / sizeof(T);         \
      memcpy(sum, (T *)(buffers + offset) + at, count * sizeof(T));                       \
      for (int r = 1; r < ranks; ++r) {                                                   \
        const T *other = (const T *)(buffers + (size_t)r * buffer_bytes + offset) + at;   \
        for (size_t i = 0; i < count; ++i) sum[i] = (T)(sum[i] + other[i]);               \
      }                                                                                   \
      for (int r = 0; r < ranks; ++r)                                                     \
        memcpy((T *)(buffers + (size_t)r * buffer_bytes + offset) + at, sum, count * sizeof(T)); \
    }                                                                                     \
  }

DEFINE_REDUCE(reduce_float32, float)
DEFINE_REDUCE(reduce_float64, double)
DEFINE_REDUCE(reduce_int8, int8_t)
DEFINE_REDUCE(reduce_uint8, uint8_t)
DEFINE_REDUCE(reduce_int32, int32_t)
DEFINE_REDUCE(reduce_int64, int64_t)

typedef void Reduce(size_t offset, size_t begin, size_t end);

static const struct {
  const char *name;
  size_t bytes;
  Reduce *reduce;
} TYPES[] = {
    {"float32", 4, reduce_float32}, {"float64", 8, reduce_float64}, {"int8", 1, reduce_int8},
    {"uint8", 1, reduce_uint8},     {"int32", 4, reduce_int32},     {"int64", 8, reduce_int64},
};

static void two_shot(Reduce *reduce, size_t offset, size_t count, size_t per_line) {
  size_t lines = (count + per_line - 1) / per_line;  // slices begin at cache lines, so that no line has two writers
  size_t begin = lines * (size_t)rank / (size_t)ranks * per_line;
  size_t end = lines * ((size_t)rank + 1) / (size_t)ranks * per_line;
  barrier();
  reduce(offset, begin, end < count ? end : count);
  barrier();
}

// Maps the shared file, `bytes` for each rank, and returns this rank's part; null when it cannot.
void *bare_memory(int fd, int ranks_, int rank_, size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), head = MAX_RANKS * sizeof(Flag);
  head = (head + page - 1) / page * page;
  bytes = (bytes + page - 1) / page * page;
  size_t total = head + (size_t)ranks_ * bytes;
  if (ranks_ > MAX_RANKS || ftruncate(fd, (off_t)total) != 0) return NULL;
  char *base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return NULL;
  flags = (Flag *)base;
  buffers = base + head;
  buffer_bytes = bytes;
  ranks = ranks_;
  rank = rank_;
  return buffers + (size_t)rank * buffer_bytes;
}

// `warm` and then `count` timed calls on `bytes` each, going round `copies` places that are `stride` bytes apart.
int bare_all_reduce(const char *dtype, size_t bytes, size_t stride, int copies, int warm, int count, double *seconds) {
  for (size_t t = 0; t < sizeof TYPES / sizeof *TYPES; ++t) {
    if (strcmp(TYPES[t].name, dtype) != 0) continue;
    for (int call = 0; call < warm + count; ++call) {
      double start = now();
      two_shot(TYPES[t].reduce, (size_t)(call % copies) * stride, bytes / TYPES[t].bytes, LINE / TYPES[t].bytes);
      if (call >= warm) seconds[call - warm] = now() - start;
    }
    return 0;
  }
  return 1;
}

void bare_memcpy(char *target, const char *source, size_t bytes, size_t stride, int copies, int warm, int count,
                 double *seconds) {
  for (int call = 0; call < warm + count; ++call) {
    size_t at = (size_t)(call % copies) * stride;
    double start = now();
    memcpy(target + at, source + at, bytes);
    if (call >= warm) seconds[call - warm] = now() - start;
  }
}
