// What happens where the kernel refuses a system call, as Yama's ptrace_scope or a container may.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <thread>

#include "support/check.h"

namespace dcoll::test {

// From now on this thread, and those it starts, get EPERM from that call. False: no filters here.
inline bool refuse(int call) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0;
}

// Runs `body` on a thread that is refused the call; where that cannot be, there is nothing to see.
inline void without(int call, const std::function<void()>& body) {
  std::exception_ptr error;
  std::thread thread([&] {
    try {
      if (refuse(call)) {
        body();
      } else {
        lacks("seccomp", "this system lets nobody install a filter");
      }
    } catch (...) {
      error = std::current_exception();
    }
  });
  thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace dcoll::test
