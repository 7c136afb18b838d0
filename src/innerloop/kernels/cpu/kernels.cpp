// Compiled once for every instruction set.
#include "backward.h"

namespace innerloop {
namespace INNERLOOP_ISA {

static int64_t scratch(const Call& call, bool backward) {
  if (call.wide) return backward ? backward_scratch<double>(call) : forward_scratch<double>(call);
  return backward ? backward_scratch<float>(call) : forward_scratch<float>(call);
}
static void run_forward(const Call& call, int64_t job, char* memory) {
  call.wide ? forward<double>(call, job, memory) : forward<float>(call, job, memory);
}
static void run_backward(const Call& call, int64_t job, char* memory) {
  call.wide ? backward<double>(call, job, memory) : backward<float>(call, job, memory);
}

extern const Kernels kernels;
const Kernels kernels{scratch, run_forward, run_backward};

}  // namespace INNERLOOP_ISA
}  // namespace innerloop
