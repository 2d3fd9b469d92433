#include "transport/mapped/shm.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/thread_safety.h"
#include "transport/mapped/mapped.h"
#include "transport/mapped/shm_mesh.h"
#include "transport/os/numa.h"

namespace dcoll {
namespace {

// The handshake's sockets, kept open: the kernel closes a dead process's end. But a child that the peer forked (a data
// loader's worker) holds that end open too and may outlive it, so the process itself is watched as well where there are
// pidfds.
class SocketWatch final : public PeerWatch {
 public:
  explicit SocketWatch(std::vector<MeshPeer> peers) : peers_(std::move(peers)) {
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      const MeshPeer& peer = peers_[rank];
      if (!peer.socket) continue;  // ourselves
      polled_.push_back({peer.socket.get(), 0, 0});
      ranks_.push_back(static_cast<int>(rank));
      if (!peer.pidfd) continue;
      polled_.push_back({peer.pidfd.get(), POLLIN, 0});
      ranks_.push_back(static_cast<int>(rank));
    }
  }

  std::vector<int> ended() override {
    const MutexLock lock(mutex_);
    std::vector<int> ranks;
    if (poll(polled_.data(), polled_.size(), 0) <= 0) return ranks;  // 0: nothing; EINTR: the next check will see it
    for (size_t i = 0; i < polled_.size(); ++i) {
      if (polled_[i].revents != 0) ranks.push_back(ranks_[i]);
    }
    return ranks;
  }

  int pid(int peer) const override { return peers_[static_cast<size_t>(peer)].pid; }

 private:
  std::vector<MeshPeer> peers_;
  Mutex mutex_;
  std::vector<pollfd> polled_ DCOLL_GUARDED_BY(mutex_);
  std::vector<int> ranks_;  // of polled_[i]
};

// Limits on address space (ulimit -v) strike here, and not in the middle of the handshake. One mapping for each peer,
// as there will be: others (PMIx) have theirs in the midst of what is free.
void check_room_for(size_t peers, size_t bytes) {
  std::vector<void*> made;
  made.reserve(peers);
  int error = 0;
  while (made.size() < peers && error == 0) {
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      error = errno;
    } else {
      made.push_back(at);
    }
  }
  for (void* at : made) munmap(at, bytes);
  if (error == 0) return;
  throw TransportError(errno_text("no address space for the shared memory of all local ranks, " +
                                      std::to_string(peers + 1) + " times " + std::to_string(bytes) + " bytes",
                                  error) +
                       "; lower DCOLL_ARENA_MB, or raise the limit on address space (ulimit -v)");
}

// By no more than this process is allowed; false: it is as high as that.
bool raise_file_limit(rlim_t by) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= files.rlim_max) return false;
  files.rlim_cur += std::min(by, files.rlim_max - files.rlim_cur);
  return setrlimit(RLIMIT_NOFILE, &files) == 0;
}

// Limits on open files strike here too: in the handshake this rank alone would fail, and peers that it has not met yet
// would look for it until the deadline. Raised by all that is needed, the limit leaves the program what it had left.
void make_room_for_files(size_t peers, const Fd& any) {
  constexpr size_t kPerPeer = 3;  // socket, bell, pidfd
  constexpr size_t kMore = 8;     // the listener, a peer's memory while it is being mapped, what a transport opens
  const size_t needed = kPerPeer * peers + kMore;
  std::vector<Fd> made;
  made.reserve(needed);
  while (made.size() < needed) {
    if (Fd one(fcntl(any.get(), F_DUPFD_CLOEXEC, 0)); one) {
      made.push_back(std::move(one));
    } else if (const int error = errno; error != EMFILE || !raise_file_limit(needed)) {
      throw TransportError(errno_text("the shared memory of " + std::to_string(peers + 1) + " local ranks needs " +
                                          std::to_string(needed) + " more open files, and there is room for " +
                                          std::to_string(made.size()),
                                      error) +
                           "; raise the limit on open files (ulimit -n)");
    }
  }
}

}  // namespace

ShmRegion::ShmRegion(ShmPeers peers, const MappedOptions& options)
    : peers_(std::move(peers)), layout_(peers_.local_size, options) {
  if (peers_.local_rank < 0 || peers_.local_rank >= peers_.local_size) {
    throw ArgumentError("local rank " + std::to_string(peers_.local_rank) + " does not exist among " +
                        std::to_string(peers_.local_size) + " local ranks");
  }
  segment_ = create_segment(layout_.region_bytes);
  region_ = std::make_shared<Region>(segment_.get(), layout_.region_bytes);
  const auto others = static_cast<size_t>(peers_.local_size - 1);
  check_room_for(others, layout_.region_bytes);
  make_room_for_files(others, segment_);
  // Peers write into the rings, and may be first to write to a result: without a policy their node would get the
  // page.
  const int numa_node = own_numa_node();
  prefer_numa_node(region_->base(), region_->bytes(), numa_node);
  region_->initialize(peers_.local_rank, numa_node);
  region_->set_bell(make_bell());
}

Endpoint ShmRegion::connect(std::chrono::milliseconds deadline, const std::function<void()>& look_around) {
  MappedWorld world{peers_.local_rank, layout_, {}, peers_.job_ranks};
  std::vector<MeshPeer> mesh(1);
  if (peers_.local_size > 1) mesh = connect_mesh(peers_, layout_, segment_, region_->bell(), deadline, look_around);
  segment_.reset();  // the mappings keep the memory alive
  for (const MeshPeer& peer : mesh) {
    if (!peer.unmapped) continue;
    region_->header().state.store(RegionHeader::kClosed, std::memory_order_release);  // it does not leave by dying
    std::rethrow_exception(peer.unmapped);
  }
  const auto own = static_cast<size_t>(peers_.local_rank);
  mesh[own].region = std::move(region_);
  mesh[own].pid = getpid();
  for (MeshPeer& peer : mesh) world.regions.push_back(peer.region);
  world.watch = std::make_shared<SocketWatch>(std::move(mesh));
  return make_mapped_endpoint("shm", std::move(world));
}

}  // namespace dcoll
