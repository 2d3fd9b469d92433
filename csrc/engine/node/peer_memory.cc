#include "engine/node/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"

namespace dcoll {
namespace {

// Bytes copied; -1 with errno.
ssize_t copy_from(int64_t process, void* to, uint64_t from, size_t bytes) {
  const iovec here{to, bytes}, there{reinterpret_cast<void*>(from), bytes};
  return process_vm_readv(static_cast<pid_t>(process), &here, 1, &there, 1, 0);
}

// It could be read when the job began.
[[noreturn]] void throw_unreadable(const Introduction& peer, int rank, int error) {
  const std::string who = "rank " + std::to_string(rank) + " (process " + std::to_string(peer.process) + ")";
  if (error == ESRCH) throw PeerError(who + " has ended in the middle of a collective; look at its output");
  const std::string what = "cannot read the memory of " + who + ": " + (error != 0 ? std::strerror(error) : "no bytes");
  if (error == EPERM) {
    throw TransportError(what +
                         ". The kernel allowed it when the job began: let no rank change its user, its "
                         "capabilities or PR_SET_DUMPABLE after dcoll.init()");
  }
  throw TransportError(what +
                       ". Its tensor was probably freed while the collective was under way: keep it until then. Or "
                       "something in that process wrote over what it posted");
}

}  // namespace

Introduction introduce(const uint64_t& word) { return {getpid(), reinterpret_cast<uint64_t>(&word), word}; }

uint64_t unlikely_word(const void* place) {
  Fingerprint print;
  print.add(reinterpret_cast<uint64_t>(place)).add(static_cast<uint64_t>(getpid()));
  print.add(static_cast<uint64_t>(Clock::now().time_since_epoch().count()));
  return print.value();
}

bool can_read(const Introduction& peer) {
  uint64_t word = 0;
  return copy_from(peer.process, &word, peer.address, sizeof word) == sizeof word && word == peer.word;
}

bool is_readable(const void* at, size_t bytes) {
  if (bytes == 0) return true;
  auto* const first = static_cast<std::byte*>(const_cast<void*>(at));
  std::byte ends[2];
  const iovec here{ends, sizeof ends}, there[2] = {{first, 1}, {first + bytes - 1, 1}};
  return process_vm_readv(getpid(), &here, 1, there, 2, 0) == sizeof ends;
}

void read_peer(const Introduction& peer, int rank, void* to, uint64_t from, size_t bytes) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t copied = copy_from(peer.process, at, from, bytes);
    if (copied < 0 && errno == EINTR) continue;
    if (copied <= 0) throw_unreadable(peer, rank, copied < 0 ? errno : 0);
    at += copied;
    from += static_cast<uint64_t>(copied);
    bytes -= static_cast<size_t>(copied);
  }
}

bool write_peer(const Introduction& peer, uint64_t to, const void* from, size_t bytes) {
  auto* at = static_cast<std::byte*>(const_cast<void*>(from));
  while (bytes > 0) {
    const iovec here{at, bytes}, there{reinterpret_cast<void*>(to), bytes};
    const ssize_t copied = process_vm_writev(static_cast<pid_t>(peer.process), &here, 1, &there, 1, 0);
    if (copied < 0 && errno == EINTR) continue;
    if (copied <= 0) return false;
    at += copied;
    to += static_cast<uint64_t>(copied);
    bytes -= static_cast<size_t>(copied);
  }
  return true;
}

}  // namespace dcoll
