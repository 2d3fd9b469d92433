// How ranks meet (transport/meeting.h), run by ctest under `mpirun -n 3` and `-n 1`.
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "support/check.h"
#include "transport/mpi_job.h"

using namespace dcoll;

TEST(backend_exchanges) {
  const int last = mpi().size() - 1;
  int value = mpi().rank() * 10 + 1;
  mpi().broadcast(&value, sizeof value, last);
  CHECK_EQ(value, last * 10 + 1);
  const int own = mpi().rank() * mpi().rank() + 5;
  const std::vector<std::byte> all = mpi().all_gather(&own, sizeof own);
  CHECK_EQ(all.size(), sizeof own * static_cast<size_t>(mpi().size()));
  for (int r = 0; r <= last; ++r) {
    int theirs = 0;
    std::memcpy(&theirs, all.data() + sizeof theirs * static_cast<size_t>(r), sizeof theirs);
    CHECK_EQ(theirs, r * r + 5);
  }
  CHECK_EQ(mpi().all_gather(nullptr, 0).size(), 0u);
}

TEST(ranks_of_other_versions_are_told_by_all) {
  if (mpi().size() == 1) return;
  StartUp start;
  const std::string same = start.version;
  if (mpi().rank() == 1) start.version = "dcoll 99.1";
  CHECK_THROWS(mpi().meet(start), ArgumentError, "The ranks run different versions of dcoll: ");
  try {
    mpi().meet(start);
  } catch (const ArgumentError& error) {
    const std::string text = error.what();
    CHECK(text.find("dcoll 99.1 on rank 1") != std::string::npos);
    CHECK(text.find(same + " on rank") != std::string::npos);
  }
  mpi().meet(StartUp());
}

TEST(who_does_not_come_is_told_and_may_come_later) {
  if (mpi().size() == 1) return;
  StartUp brief;
  brief.timeout_s = 0.5;
  const int last = mpi().size() - 1;
  if (mpi().rank() == last) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
  } else {
    CHECK_THROWS(mpi().meet(brief), TimeoutError,
                 "rank " + std::to_string(last) + " has not called dcoll.init() (again)");
  }
  mpi().meet(StartUp());
  mpi().barrier();
}

TEST(who_leaves_the_start_up_keeps_nobody_waiting) {
  if (mpi().size() == 1) return;
  for (const int who : {0, 1}) {
    mpi().meet(StartUp());
    if (mpi().rank() == who) {
      mpi().leave("the test wants it so");
    } else {
      CHECK_THROWS(mpi().barrier(), PeerError, "the test wants it so");
    }
    CHECK_THROWS(mpi().barrier(), TransportError, "have not met");
  }
  mpi().meet(StartUp());
  mpi().barrier();
}

int main(int argc, char** argv) {
  const int status = dcoll::test::run(argc, argv);
  if (status != 0) mpi().abort(status);
  mpi().finalize();
  return 0;
}
