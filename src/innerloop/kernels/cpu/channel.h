// The core of all rules whose memory fades channel by channel, in either precision.
#pragma once

#include "channel_backward.h"

namespace innerloop::INNERLOOP_ISA {

static int64_t channel_scratch(const void* data, int64_t way) {
  const ChannelCall& call = *static_cast<const ChannelCall*>(data);
  if (way == 2) return call.wide ? channel::trail_bytes<double>(call) : channel::trail_bytes<float>(call);
  if (call.wide) return way ? channel::backward_scratch<double>(call) : channel::forward_scratch<double>(call);
  return way ? channel::backward_scratch<float>(call) : channel::forward_scratch<float>(call);
}

static void channel_run(const void* data, int64_t way, int64_t job, char* scratch) {
  const ChannelCall& call = *static_cast<const ChannelCall*>(data);
  if (call.wide)
    return way ? channel::backward<double>(call, job, scratch) : channel::forward<double>(call, job, scratch);
  return way ? channel::backward<float>(call, job, scratch) : channel::forward<float>(call, job, scratch);
}

}  // namespace innerloop::INNERLOOP_ISA
