#include "transport/mapped/shm_mesh.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <type_traits>

#include "base/error.h"
#include "base/hash.h"
#include "transport/os/processes.h"

namespace dcoll {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kHelloMagic = 0x6f6c6c6568636c64ull;  // bytes on the wire; change them when the protocol changes
constexpr uint64_t kProofMagic = 0x666f6f7270636c64ull;
constexpr uint64_t kSegmentMagic = 0x746e656d67736c64ull;
constexpr uint32_t kProtocolVersion = 2;
constexpr auto kRetryInterval = std::chrono::milliseconds(2);

struct Hello {
  uint64_t magic;
  uint32_t version;
  int32_t local_rank;
  int32_t local_size;
  int32_t slots;
  uint64_t slot_bytes;
  uint64_t arena_bytes;
  uint8_t nonce[16];
};
struct Proof {
  uint64_t magic;
  uint64_t hash;
};
struct Segment {
  uint64_t magic;
  uint64_t bytes;
};
static_assert(std::has_unique_object_representations_v<Hello>);  // it is hashed: no padding

// One handshake in progress, or done.
struct Connection {
  enum class Step { kHello, kProof, kSegment, kDone };  // what we wait for
  Fd socket;
  Step step = Step::kHello;
  int peer = -1;  // unknown until Hello for a connection we accepted
  int pid = 0;
  Hello mine{};
  Hello theirs{};
};

std::string local_rank_text(int rank, int pid) {
  return "local rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long>(left, 0, 100));
}

class Mesh {
 public:
  Mesh(const ShmPeers& peers, const RegionLayout& layout, const Fd& segment, const Fd& bell)
      : self_(peers), layout_(layout), passed_{segment.get(), bell.get()}, done_(peers.local_size) {
    listener_ = listen_at(mesh_address(self_.key, self_.local_rank), self_.local_size + 16);
  }

  std::vector<MeshPeer> connect(std::chrono::milliseconds limit, const std::function<void()>& look_around) {
    const auto deadline = Clock::now() + limit;
    while (missing() > 0) {
      if (look_around) look_around();
      if (Clock::now() >= deadline) throw TransportError(timeout_text(limit));
      connect_to_lower_ranks();
      wait_for_events(deadline);
      accept_higher_ranks();
      for (Connection& c : connections_) advance(c);
      std::erase_if(connections_, [](const Connection& c) { return !c.socket; });
      if (missing() > 0) check_done_peers();
    }
    return std::move(done_);
  }

 private:
  int missing() const {
    return self_.local_size - 1 - static_cast<int>(std::count_if(done_.begin(), done_.end(), is_done));
  }
  static bool is_done(const MeshPeer& peer) { return static_cast<bool>(peer.socket); }

  void connect_to_lower_ranks() {
    for (int peer = 0; peer < self_.local_rank; ++peer) {
      const bool under_way =
          std::any_of(connections_.begin(), connections_.end(), [peer](const Connection& c) { return c.peer == peer; });
      if (is_done(done_[static_cast<size_t>(peer)]) || under_way) continue;
      if (Fd socket = connect_to(mesh_address(self_.key, peer))) begin(std::move(socket), peer);
    }
  }

  void accept_higher_ranks() {
    while (Fd socket = accept_from(listener_)) begin(std::move(socket), -1);
  }

  // Steps 0 and 1.
  void begin(Fd socket, int peer) {
    const Credentials who = peer_credentials(socket);
    if (who.uid != geteuid()) {
      hint_ = "; a process of user id " + std::to_string(who.uid) + " was turned away, ranks must run as one user (" +
              std::to_string(geteuid()) + ")";
      return;
    }
    Connection c;
    c.peer = peer;
    c.pid = who.pid;
    c.mine = {.magic = kHelloMagic,
              .version = kProtocolVersion,
              .local_rank = self_.local_rank,
              .local_size = self_.local_size,
              .slots = layout_.slots,
              .slot_bytes = layout_.slot_bytes,
              .arena_bytes = layout_.arena_bytes,
              .nonce = {}};
    if (getrandom(c.mine.nonce, sizeof(c.mine.nonce), 0) != sizeof(c.mine.nonce)) {
      throw TransportError(errno_text("no random numbers", errno));
    }
    if (!send_packet(socket, &c.mine, sizeof(c.mine))) return;
    c.socket = std::move(socket);
    connections_.push_back(std::move(c));
  }

  // Takes every packet that is there. Whoever fails a check is dropped; a peer below us is then tried again.
  void advance(Connection& c) {
    while (c.socket) {
      Received got = Received::kNothingYet;
      bool accepted = false;
      switch (c.step) {
        case Connection::Step::kHello:
          got = receive_packet(c.socket, &c.theirs, sizeof(c.theirs));
          accepted = got == Received::kPacket && take_hello(c);
          break;
        case Connection::Step::kProof: {
          Proof proof;
          got = receive_packet(c.socket, &proof, sizeof(proof));
          accepted = got == Received::kPacket && take_proof(c, proof);
          break;
        }
        case Connection::Step::kSegment: {
          Segment segment;
          std::array<Fd, 2> passed;
          got = receive_packet(c.socket, &segment, sizeof(segment), passed);
          accepted = got == Received::kPacket && take_segment(c, segment, passed[0], std::move(passed[1]));
          break;
        }
        case Connection::Step::kDone:
          return;
      }
      if (got == Received::kNothingYet) return;
      if (!accepted) c.socket.reset();
    }
  }

  bool take_hello(Connection& c) {
    const Hello& h = c.theirs;
    if (h.magic != kHelloMagic || h.version != kProtocolVersion) return false;
    if (c.peer >= 0 ? h.local_rank != c.peer : h.local_rank <= self_.local_rank) return false;
    const Proof proof{kProofMagic, proof_hash(c.mine, c.theirs)};
    c.step = Connection::Step::kProof;
    return send_packet(c.socket, &proof, sizeof(proof));
  }

  bool take_proof(Connection& c, const Proof& proof) {
    if (proof.magic != kProofMagic || proof.hash != proof_hash(c.theirs, c.mine)) return false;
    // From here on the peer is one of ours, and what is wrong with it is an error of the job.
    check_agreement(c);
    c.peer = c.theirs.local_rank;
    const Segment own{kSegmentMagic, layout_.region_bytes};
    c.step = Connection::Step::kSegment;
    return !is_done(done_[static_cast<size_t>(c.peer)]) && send_packet(c.socket, &own, sizeof(own), passed_);
  }

  bool take_segment(Connection& c, const Segment& segment, const Fd& memory, Fd bell) {
    MeshPeer& peer = done_[static_cast<size_t>(c.peer)];
    if (segment.magic != kSegmentMagic || !memory || !bell || is_done(peer)) return false;
    peer.pid = c.pid;
    try {
      peer.region = map_segment(memory, layout_, c.peer);
      peer.region->set_bell(std::move(bell));
      if (peer.pid == 0) peer.pid = static_cast<int>(peer.region->header().pid);
    } catch (...) {
      peer.unmapped = std::current_exception();
    }
    peer.pidfd = open_pidfd(c.pid);
    peer.socket = std::move(c.socket);
    c.step = Connection::Step::kDone;
    return true;
  }

  uint64_t proof_hash(const Hello& prover, const Hello& verifier) const {
    const Hello both[2] = {prover, verifier};
    return siphash(self_.key, both, sizeof(both));
  }

  void check_agreement(const Connection& c) const {
    auto compare = [&](const char* what, uint64_t mine, uint64_t theirs) {
      if (mine == theirs) return;
      throw TransportError("local ranks disagree about " + std::string(what) + ": local rank " +
                           std::to_string(self_.local_rank) + " has " + std::to_string(mine) + ", " +
                           local_rank_text(c.theirs.local_rank, c.pid) + " has " + std::to_string(theirs) +
                           "; give every rank the same settings");
    };
    compare("the number of local ranks", static_cast<uint64_t>(c.mine.local_size),
            static_cast<uint64_t>(c.theirs.local_size));
    compare("slots (DCOLL_SLOTS)", static_cast<uint64_t>(c.mine.slots), static_cast<uint64_t>(c.theirs.slots));
    compare("slot bytes (DCOLL_SLICE_KB)", c.mine.slot_bytes, c.theirs.slot_bytes);
    compare("arena bytes (DCOLL_ARENA_MB)", c.mine.arena_bytes, c.theirs.arena_bytes);
    if (c.theirs.local_rank >= self_.local_size) {
      throw TransportError("local rank " + std::to_string(c.theirs.local_rank) + " does not exist among " +
                           std::to_string(self_.local_size) + " local ranks");
    }
  }

  // Sleeps until a socket has something, or it is time to look for lower ranks again.
  void wait_for_events(Clock::time_point deadline) {
    bool looking = false;  // for a rank that does not listen yet
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const Connection& c : connections_) polled.push_back({c.socket.get(), POLLIN, 0});
    for (int peer = 0; peer < self_.local_size; ++peer) {
      const MeshPeer& done = done_[static_cast<size_t>(peer)];
      if (done.socket && !closed_[peer]) polled.push_back({done.socket.get(), 0, 0});
      if (peer < self_.local_rank && !is_done(done)) looking = true;
    }
    int timeout = milliseconds_until(deadline);
    if (looking) timeout = std::min(timeout, static_cast<int>(kRetryInterval.count()));
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) {
      throw TransportError(errno_text("cannot poll local sockets", errno));
    }
  }

  // A finished peer may already be done with everything and close; but if it died we need not wait for the deadline.
  void check_done_peers() {
    for (int peer = 0; peer < self_.local_size; ++peer) {
      const MeshPeer& done = done_[static_cast<size_t>(peer)];
      if (!done.socket || done.unmapped || closed_[peer]) continue;
      pollfd hangup{done.socket.get(), 0, 0};
      if (poll(&hangup, 1, 0) <= 0) continue;
      closed_[peer] = true;
      if (done.region->header().state.load(std::memory_order_acquire) != RegionHeader::kClosed) {
        throw TransportError(local_rank_text(peer, done.pid) +
                             " gave up or died while the local ranks were connecting (its own message tells why); "
                             "local rank " +
                             std::to_string(self_.local_rank) + " had yet to reach " + missing_text());
      }
    }
  }

  std::string missing_text() const {
    std::string ranks;
    for (int peer = 0; peer < self_.local_size; ++peer) {
      if (peer == self_.local_rank || is_done(done_[static_cast<size_t>(peer)])) continue;
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
    }
    return "local rank(s) " + ranks;
  }

  std::string timeout_text(std::chrono::milliseconds limit) const {
    return "local rank " + std::to_string(self_.local_rank) + " could not reach " + missing_text() + " within " +
           std::to_string(limit.count()) +
           " ms; they have not started connecting, belong to another job, or run in a container with a network "
           "namespace of its own" +
           hint_;
  }

  const ShmPeers& self_;
  const RegionLayout& layout_;
  const std::array<int, 2> passed_;  // our memory and bell
  Fd listener_;
  std::vector<Connection> connections_;
  std::vector<MeshPeer> done_;
  std::vector<bool> closed_ = std::vector<bool>(static_cast<size_t>(self_.local_size));
  std::string hint_;
};

}  // namespace

Fd create_segment(size_t bytes) {
  // Beyond this limit ftruncate does not fail, it kills the process with SIGXFSZ.
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY && bytes > file_size.rlim_cur) {
    throw TransportError("shared memory needs a file of " + std::to_string(bytes) + " bytes, but the limit is " +
                         std::to_string(file_size.rlim_cur) + "; raise it (ulimit -f) or lower DCOLL_ARENA_MB");
  }
  // Nobody can make it executable; kernels before 6.3 do not know the flag.
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, which older headers lack
  Fd segment(memfd_create("dcoll", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
  if (!segment && errno == EINVAL) segment = Fd(memfd_create("dcoll", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment) throw TransportError(errno_text("memfd_create", errno));
  if (ftruncate(segment.get(), static_cast<off_t>(bytes)) != 0) {
    throw TransportError(errno_text("cannot size shared memory to " + std::to_string(bytes) + " bytes", errno) +
                         "; lower DCOLL_ARENA_MB");
  }
  if (fcntl(segment.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw TransportError(errno_text("cannot seal shared memory", errno));
  }
  return segment;
}

std::shared_ptr<Region> map_segment(const Fd& segment, const RegionLayout& layout, int local_rank) {
  const std::string whose = "the memory of local rank " + std::to_string(local_rank);
  struct stat info{};
  if (fstat(segment.get(), &info) != 0) throw TransportError(errno_text("cannot inspect " + whose, errno));
  if (info.st_size != static_cast<off_t>(layout.region_bytes)) {
    throw TransportError(whose + " has " + std::to_string(info.st_size) + " bytes instead of " +
                         std::to_string(layout.region_bytes));
  }
  const int seals = fcntl(segment.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw TransportError(whose + " is not sealed against shrinking");
  auto region = std::make_shared<Region>(segment.get(), layout.region_bytes);
  const RegionHeader& header = region->header();
  if (header.magic != RegionHeader::kMagic || header.local_rank != static_cast<uint32_t>(local_rank)) {
    throw TransportError(whose + " does not begin with its header");
  }
  return region;
}

std::string mesh_address(const SipKey& key, int local_rank) {
  std::string name = "dcoll-";
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t input[2] = {static_cast<uint32_t>(local_rank), half};
    name += hex(siphash(key, input, sizeof(input)));
  }
  return name;
}

std::vector<MeshPeer> connect_mesh(const ShmPeers& peers, const RegionLayout& layout, const Fd& segment, const Fd& bell,
                                   std::chrono::milliseconds limit, const std::function<void()>& look_around) {
  return Mesh(peers, layout, segment, bell).connect(limit, look_around);
}

}  // namespace dcoll
