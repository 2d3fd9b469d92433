#include "transport/shm.h"

#include <poll.h>
#include <unistd.h>

#include <mutex>

#include "base/error.h"
#include "transport/mapped.h"
#include "transport/numa.h"
#include "transport/shm_mesh.h"

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
    const std::lock_guard lock(mutex_);
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
  std::mutex mutex_;  // guards polled_
  std::vector<pollfd> polled_;
  std::vector<int> ranks_;  // of polled_[i]
};

}  // namespace

Endpoint connect_shm(const ShmPeers& peers, const MappedOptions& options, std::chrono::milliseconds deadline) {
  if (peers.local_rank < 0 || peers.local_rank >= peers.local_size) {
    throw ArgumentError("local rank " + std::to_string(peers.local_rank) + " does not exist among " +
                        std::to_string(peers.local_size) + " local ranks");
  }
  const RegionLayout layout(peers.local_size, options);
  const auto own = static_cast<size_t>(peers.local_rank);
  MappedWorld world{peers.local_rank, layout, {}, peers.job_ranks};
  std::vector<MeshPeer> mesh(1);
  {
    const Fd segment = create_segment(layout.region_bytes);  // closed below: the mappings keep the memory alive
    auto region = std::make_shared<Region>(segment.get(), layout.region_bytes);
    // Peers write into the rings, and may be first to write to a result: without a policy their node would get the
    // page.
    const int numa_node = own_numa_node();
    prefer_numa_node(region->base(), region->bytes(), numa_node);
    region->initialize(peers.local_rank, numa_node);
    region->set_bell(make_bell());
    if (peers.local_size > 1) mesh = connect_mesh(peers, layout, segment, region->bell(), deadline);
    mesh[own].region = std::move(region);
    mesh[own].pid = getpid();
  }
  for (MeshPeer& peer : mesh) world.regions.push_back(peer.region);
  world.watch = std::make_shared<SocketWatch>(std::move(mesh));
  return make_mapped_endpoint("shm", std::move(world));
}

}  // namespace dcoll
