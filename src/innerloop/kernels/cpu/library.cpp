// The library's face: plain C, so that it knows nothing of a Python or torch version.
#include <cstdlib>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "call.h"

namespace innerloop {
#define INNERLOOP_DECLARE(isa) \
  namespace isa {              \
  extern const Core cores[];   \
  extern bool takes_pairs;     \
  }
INNERLOOP_DECLARE(plain)
#ifdef INNERLOOP_X86
INNERLOOP_DECLARE(avx2)
INNERLOOP_DECLARE(avx512)
#endif
#ifdef INNERLOOP_BF16
INNERLOOP_DECLARE(avx512_bf16)
#endif

constexpr int64_t kPage = int64_t(2) << 20;

struct Choice {
  const char* name;
  const Core* cores;
  bool* pairs;
};

#ifdef INNERLOOP_X86
static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
}
#endif

// What the processor has and, if INNERLOOP_ISA names one, no more than that.
static Choice choose() {
  const char* most = std::getenv("INNERLOOP_ISA");
#ifdef INNERLOOP_X86
  __builtin_cpu_init();
  const bool limited = most && *most;
#ifdef INNERLOOP_BF16
  if (has_avx512() && __builtin_cpu_supports("avx512bf16") && (!limited || !std::strcmp(most, "avx512_bf16")))
    return {"avx512_bf16", avx512_bf16::cores, &avx512_bf16::takes_pairs};
#endif
  if (has_avx512() && (!limited || !std::strcmp(most, "avx512") || !std::strcmp(most, "avx512_bf16")))
    return {"avx512", avx512::cores, &avx512::takes_pairs};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (!limited || std::strcmp(most, "plain")))
    return {"avx2", avx2::cores, &avx2::takes_pairs};
#endif
  (void)most;
  return {"plain", plain::cores, &plain::takes_pairs};
}
// INNERLOOP_PAIRS: whether bfloat16 is multiplied in pairs (pairs.h), whatever the processor has for it.
static Choice chosen_by_environment() {
  const Choice choice = choose();
  const char* wanted = std::getenv("INNERLOOP_PAIRS");
  if (wanted && *wanted) *choice.pairs = std::strcmp(wanted, "0") != 0;
  return choice;
}
static const Choice chosen = chosen_by_environment();

// Denormals count as zero within a job: they cost a hundred cycles each, and a tail of zeros makes nothing else.
class FlushToZero {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();

 public:
  FlushToZero() { _mm_setcsr(before | 0x8040); }
  ~FlushToZero() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;

 public:
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(before | (uint64_t(1) << 24)));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

// Fresh pages of 4 KB cost more than what is done with them; large ones are handed out five hundred times as fast.
static void want_large_pages(void* data, int64_t size) {
#ifdef __linux__
  const uintptr_t page = kPage, from = (uintptr_t(data) + page - 1) / page * page, to = (uintptr_t(data) + size) / page * page;
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
  (void)data, (void)size;
}

// A thread keeps its memory from call to call, unless it is very much.
class Memory {
  char* data = nullptr;
  int64_t size = 0;
  static constexpr int64_t kKept = int64_t(64) << 20;

 public:
  ~Memory() { std::free(data); }
  char* get(int64_t wanted) {
    if (wanted > size) {
      std::free(data);
      size = (wanted + kPage - 1) / kPage * kPage;
      data = static_cast<char*>(std::aligned_alloc(kPage, size));
      if (!data) size = 0;
      want_large_pages(data, size);
    }
    return data;
  }
  void give_back() {
    if (size <= kKept) return;
    std::free(data);
    data = nullptr, size = 0;
  }
};
static thread_local Memory memory;

static int64_t run(const Core& core, const void* call, int64_t way) {
  const Header& header = *static_cast<const Header*>(call);
  const int64_t jobs = header.jobs, scratch = core.scratch(call, way);
  int64_t failed = 0;
#ifdef _OPENMP
  const int threads = int(header.threads < jobs ? header.threads : jobs);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
#endif
  {
    const FlushToZero flush;
    char* mine = memory.get(scratch);
    failed = !mine;
    if (header.length == 1) {
      // From token to token a thread keeps its memories, which lie in its core's cache.
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
      for (int64_t job = 0; job < jobs; ++job)
        if (mine) core.run(call, way, job, mine);
    } else {
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1)
#endif
      for (int64_t job = 0; job < jobs; ++job)
        if (mine) core.run(call, way, job, mine);
    }
    memory.give_back();
  }
  return failed ? 2 : 0;
}

static int64_t checked(const Header& call) {
  for (int64_t n = 0; call.bounds && n < call.sequences; ++n)
    if (call.bounds[0] < 0 || call.bounds[n] > call.bounds[n + 1] || call.bounds[n + 1] > call.length) return 1;
  return 0;
}

}  // namespace innerloop

extern "C" {
// 0: done; 1: bounds that do not rise within the row; 2: no memory.
__attribute__((visibility("default"))) int64_t innerloop_run(int64_t core, const void* call, int64_t way) {
  const int64_t wrong = innerloop::checked(*static_cast<const innerloop::Header*>(call));
  return wrong ? wrong : innerloop::run(innerloop::chosen.cores[core], call, way);
}
// A call prepared before, with the addresses of this one: core, way, size of the call, number of addresses, where each
// goes, then the call itself, all counted in eight bytes.
__attribute__((visibility("default"))) int64_t innerloop_again(const int64_t* plan, const int64_t* addresses) {
  constexpr int64_t kMost = 256;
  const int64_t size = plan[2], count = plan[3], *places = plan + 4, *call = places + count;
  int64_t filled[kMost];
  if (size > kMost) return 3;
  std::memcpy(filled, call, size * sizeof(int64_t));
  for (int64_t i = 0; i < count; ++i) filled[places[i]] = addresses[i];
  return innerloop_run(plan[0], filled, plan[1]);
}
// Calls one behind another, each as core, way, size of the call in eight bytes, then the call itself.
__attribute__((visibility("default"))) int64_t innerloop_series(const int64_t* calls, int64_t count) {
  int64_t failed = 0;
  for (; count > 0 && !failed; --count, calls += 3 + calls[2]) failed = innerloop_run(calls[0], calls + 3, calls[1]);
  return failed;
}
__attribute__((visibility("default"))) int64_t innerloop_scratch(int64_t core, const void* call, int64_t way) {
  return innerloop::chosen.cores[core].scratch(call, way);
}
// Ask for large pages where [data, data + size) is touched for the first time.
__attribute__((visibility("default"))) void innerloop_large_pages(void* data, int64_t size) {
  innerloop::want_large_pages(data, size);
}
__attribute__((visibility("default"))) const char* innerloop_isa() { return innerloop::chosen.name; }
// 0 for a core that this library does not have.
__attribute__((visibility("default"))) int64_t innerloop_call_size(int64_t core) {
  return core < innerloop::kCores ? innerloop::chosen.cores[core].call_size : 0;
}
}
