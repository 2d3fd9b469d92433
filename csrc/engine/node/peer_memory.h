// Reading and writing the private memory of the node's other processes: one copy, made by the kernel
// (process_vm_readv, process_vm_writev), where going through a slot takes two and lines that wander between caches.
//
// Linux allows it between processes of one user, unless that was restricted (Yama's ptrace_scope, seccomp, separate
// containers). So every rank introduces itself in shared memory, everybody tries to read a word of everybody else, and
// it is used only where all could.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcoll {

// In shared memory; written before the post that tells of it (release), read after that was seen (acquire).
struct Introduction {
  int64_t process = 0;
  uint64_t address = 0;  // of a word in private memory,
  uint64_t word = 0;     // which holds this: a process of the same number in another namespace has something else there
};

Introduction introduce(const uint64_t& word);
// A number that no other process has where this one has it.
uint64_t unlikely_word(const void* place);

bool can_read(const Introduction& peer);
// Whether the kernel reads this memory of ours for others: a driver's mappings and secret memory it does not, though we
// can. Asked of both ends.
bool is_readable(const void* at, size_t bytes);
// Copies `bytes` from the peer's address `from`. Throws PeerError: it died; TransportError: it has given up that
// memory, or the kernel has changed its mind.
void read_peer(const Introduction& peer, int rank, void* to, uint64_t from, size_t bytes);
// The other way, to the peer's address `to`; the kernel asks for no other permission. False: it does not let us. Of a
// peer that has ended, too, which others notice.
bool write_peer(const Introduction& peer, uint64_t to, const void* from, size_t bytes);

}  // namespace dcoll
