// How a collective goes, decided in one place.
#pragma once

#include <cstdint>
#include <string_view>

#include "engine/collective/fabric.h"
#include "engine/core/call.h"

namespace dcoll {

enum class Path : uint8_t {
  kMeeting,     // a barrier, a shutdown or a join: the handshake is all of it
  kNodeDirect,  // an all-reduce over memory that all ranks share (node/node_all_reduce.h)
  kPull,        // any other collective over such memory (node/pull.h)
  kRide,        // a small all-reduce between nodes that rides on the handshake (rider.h)
  kTwoLevels,   // an all-reduce inside the nodes and between them (levels/hierarchical_all_reduce.h)
  kAdasum,      // adasum.h
  kSchedule,    // messages, as a schedule of plan/ says (by_schedule.h)
  kNccl,        // on GPUs, by NCCL (by_nccl.h)
  kOpened,      // on devices, in memory that ranks have opened of each other (on_device.h)
};

// For people: "Adasum's tree of pairs", "a schedule of messages".
std::string_view path_text(Path path);

// Whether the messages of an all-reduce carry its codec's form: float32 that is summed, of more than
// Call::kSmallBytes, between nodes; with DCOLL_COMPRESS_LOCAL all float32 that is summed. Of Encoding::if_it_pays: once
// it is known that it does. With the drive lock held, but where all ranks share memory.
bool uses_codec(const Fabric& fabric, const Call& call);  // which has one
bool has_codec(const Fabric& fabric, const Call& call);   // for what is called, wherever it goes
inline bool encodes(const Fabric& fabric, const Call& call) { return call.encoding && uses_codec(fabric, call); }
// fp16 and bf16, to nearest, are casts, which devices make (of NCCL's calls); the host makes all else.
bool is_cast(const kernels::Encoding& encoding);
// Whether a call whose encoding is a cast is cast on devices: wherever it may be, for there that costs next to nothing.
bool is_cast_on_device(const Fabric& fabric, const Call& call);

// The same on every rank for calls with equal fingerprints. Of a call on devices: as far as is known by now, and while
// no rank has to go by the host.
Path choose_path(const Fabric& fabric, const Call& call);
// Of one whose memory is the host's or is copied there, whatever its device: never kNccl nor kOpened.
Path path_by_host(const Fabric& fabric, const Call& call);

}  // namespace dcoll
