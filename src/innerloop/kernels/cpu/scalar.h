// The core of all rules whose memory fades by one number a token, in either precision.
#pragma once

#include "backward.h"

namespace innerloop::INNERLOOP_ISA {

static int64_t scalar_scratch(const void* data, int64_t way) {
  const ScalarCall& call = *static_cast<const ScalarCall*>(data);
  if (way == 2)
    return call.wide ? Trail<double>::of_call_bytes(Frame<double>(call, 0, 0)) : Trail<float>::of_call_bytes(Frame<float>(call, 0, 0));
  if (call.wide) return way ? backward_scratch<double>(call) : forward_scratch<double>(call);
  return way ? backward_scratch<float>(call) : forward_scratch<float>(call);
}

static void scalar_run(const void* data, int64_t way, int64_t job, char* scratch) {
  const ScalarCall& call = *static_cast<const ScalarCall*>(data);
  if (call.wide) return way ? backward<double>(call, job, scratch) : forward<double>(call, job, scratch);
  return way ? backward<float>(call, job, scratch) : forward<float>(call, job, scratch);
}

}  // namespace innerloop::INNERLOOP_ISA
