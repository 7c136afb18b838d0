// Random calls of the kernels in every instruction set of this processor, compared with the plain one's answers.
#include <csignal>
#include <cstring>
#include <memory>
#include <unistd.h>

#include <immintrin.h>
#include <sys/io.h>

#include "channel.h"
#include "conversions.h"
#include "convolution.h"
#include "momentum.h"
#include "norm.h"
#include "scalar.h"

extern "C" const char* innerloop_isa();

namespace innerloop {
namespace plain {
extern const Core cores[kCores];
extern bool takes_pairs;
}
namespace avx2 {
extern const Core cores[kCores];
extern bool takes_pairs;
}
namespace avx512 {
extern const Core cores[kCores];
extern bool takes_pairs;
}
namespace avx512_bf16 {
extern const Core cores[kCores];
extern bool takes_pairs;
}
}  // namespace innerloop

namespace emulate {

constexpr int kSets = 4;

struct Set {
  const char* name;
  const innerloop::Core* cores;
  bool present;
  int64_t failed;
  double worst[3];  // in tolerances: of float32, float64 and sixteen bits
};

// The library counts denormals as zero within a job.
static void flush_to_zero() { _mm_setcsr(_mm_getcsr() | 0x8040); }

static int64_t current = -1;
static uint64_t seed = 1;

// As the first process of an emulated machine there is nobody to return to: Bochs stops when it reads this word.
static void leave(int code) {
  std::printf("exit %d\n", code);
  std::fflush(stdout);
  if (getpid() != 1) _exit(code);
  sleep(1);
  if (!ioperm(0x8900, 1, 1))
    for (const char* letter = "Shutdown"; *letter; ++letter) outb(*letter, 0x8900);
  for (;;) pause();
}
static void on_fault(int signal) {
  std::printf("FAILED trial %lld of seed %llu: signal %d\n", (long long)current, (unsigned long long)seed, signal);
  leave(1);
}

static void compare(Set& set, const Outcome& truth, const Outcome& found, std::string& wrong) {
  for (size_t i = 0; i < truth.size(); ++i) {
    const double off = distance(truth[i], found[i]);
    double& worst = set.worst[truth[i].wide ? 1 : rounding(truth[i].element) > 0 ? 2 : 0];
    if (off > worst) worst = off;
    if (off <= 1) continue;
    char text[80];
    std::snprintf(text, sizeof text, " is off by %.3g tolerances; ", off);
    wrong += found[i].name + text;
  }
}

template <class Trial>
static void run(Set (&sets)[kSets], uint64_t number, int64_t core) {
  const Trial trial(seed * 0x100000001b3u + number);
  // Every set does what only the last one does by itself, at some trials.
  for (bool* pairs : {&innerloop::plain::takes_pairs, &innerloop::avx2::takes_pairs, &innerloop::avx512::takes_pairs,
                      &innerloop::avx512_bf16::takes_pairs})
    *pairs = number & 4;
  Outcome truth;
  for (Set& set : sets) {
    if (!set.present) continue;
    std::string wrong;
    Outcome found = trial.run(set.cores[core], wrong);
    if (&set == sets) truth = std::move(found);
    else compare(set, truth, found, wrong);
    if (wrong.empty()) continue;
    ++set.failed;
    std::printf("FAILED %s, trial %lld of seed %llu: %s\n    %s\n", set.name, (long long)number,
                (unsigned long long)seed, wrong.c_str(), trial.described().c_str());
  }
}

static int report(const Set (&sets)[kSets], int64_t from, int64_t count) {
  int64_t failed = 0;
  for (const Set& set : sets) {
    failed += set.failed;
    if (set.present)
      std::printf("%s: trials %lld to %lld of seed %llu, %lld failed; worst in tolerances: %.2g float32, %.2g float64, "
                  "%.2g sixteen bits\n",
                  set.name, (long long)from, (long long)(from + count - 1), (unsigned long long)seed,
                  (long long)set.failed, set.worst[0], set.worst[1], set.worst[2]);
    else std::printf("%s: not on this processor\n", set.name);
  }
  std::printf("the library takes %s\n", innerloop_isa());
  return failed ? 1 : 0;
}

static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
}

static bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Trial `number` of the seed, of the core that is asked for or, of all, of the one whose turn it is.
static void run_one(Set (&sets)[kSets], int64_t number, const std::string& only) {
  static const char* const turns[] = {"scalar", "convolution", "channel", "momentum", "channel", "norm", "scalar", "momentum"};
  const std::string name = !only.empty() ? only : number % 40 == 39 ? "conversions" : turns[number % 8];
  if (name == "conversions") run<Conversions>(sets, number, innerloop::kScalar);
  else if (name == "convolution") run<Convolution>(sets, number, innerloop::kConvolution);
  else if (name == "norm") run<Norm>(sets, number, innerloop::kNorm);
  else if (name == "channel") run<Channel>(sets, number, innerloop::kChannel);
  else if (name == "momentum") run<Momentum>(sets, number, innerloop::kMomentum);
  else run<Scalar>(sets, number, innerloop::kScalar);
}

static int run_all(int64_t count, int64_t from, const std::string& only) {
  Set sets[] = {{"plain", innerloop::plain::cores, true, 0, {}},
                {"avx2", innerloop::avx2::cores, has_avx2(), 0, {}},
                {"avx512", innerloop::avx512::cores, has_avx512(), 0, {}},
                {"avx512_bf16", innerloop::avx512_bf16::cores, has_bf16(), 0, {}}};
  for (current = from; current < from + count; ++current) {
    run_one(sets, current, only);
    if (current % 25 == 24) std::printf("%lld\n", (long long)current + 1), std::fflush(stdout);
  }
  return report(sets, from, count);
}

}  // namespace emulate

// Arguments: how many trials, the seed, the first trial's number, and the one core to be tried.
int main(int count, char** arguments) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, emulate::on_fault);
  const auto number = [&](int i, long long missing) { return i < count ? std::atoll(arguments[i]) : missing; };
  emulate::seed = number(2, 1);
  emulate::flush_to_zero();
  emulate::leave(emulate::run_all(number(1, 200), number(3, 0), count > 4 ? arguments[4] : ""));
}
