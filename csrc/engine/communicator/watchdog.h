// The watchdog of a communicator: deadlines, peers that have ended, and stalls, of which it tells the user together
// with the other ranks (diagnosis.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/communicator/members.h"
#include "engine/communicator/progress.h"
#include "engine/watch/diagnosis.h"
#include "transport/os/processes.h"

namespace dcoll {

class Watchdog final : public Watched, public Notes {
 public:
  Watchdog(const Setup& setup, Progress& progress)
      : setup_(setup),
        progress_(progress),
        timeout_s_(setup.settings.timeout_s),
        work_(setup.members.process_of_rank) {}

  // How long an operation may make no progress: DCOLL_TIMEOUT, or what was set since. Alike on all ranks.
  double timeout_s() const { return timeout_s_.load(std::memory_order_relaxed); }
  void set_timeout(double seconds) { timeout_s_.store(seconds, std::memory_order_relaxed); }

  // Answers the questions of other ranks from now on. of_the_process: what does so; made where it is null.
  void begin_listening(std::shared_ptr<Diagnosis>& of_the_process);
  void stop_listening();
  // Of who drives, with the drive lock held: after every look, `now` being when the clock was read last before it.
  void looked(Clock::time_point now) {
    progress_.drive_mutex.is_held();
    const Clock::duration away = now - last_look_;
    last_look_ = std::max(last_look_, now);
    if (away > kMostBetweenLooks) [[unlikely]]
      forgive(now, away - kMostBetweenLooks);
  }
  // The same, when a look brought nothing, and before it sleeps.
  void watch(Clock::time_point now);
  // What a wait says when its limit of so many seconds has passed, naming who is missing.
  std::string unfinished_text(const Operation& operation, double timeout_s);

  // ---- For the thread of the job's Diagnosis ----
  uint64_t id() const override;
  int rank() const override { return setup_.members.rank; }
  std::vector<int> job_ranks() const override { return setup_.members.all_job_ranks(); }
  std::optional<Stall> find_stall(double stagger, bool& later) override;
  uint64_t answer(const Question& question, int asker, Answer& answer) override;
  std::optional<uint64_t> waits_here(std::string& text) override;
  void report_stall(Operation& operation, const std::string& text, const std::map<int, Answer>& answers,
                    const std::vector<int>& silent) override;
  bool take_notes(std::vector<Note>& notes) override;
  void post_note(int peer, const std::string& text) override;
  Transport& listens_on() override { return setup_.transport(); }

 private:
  const UnderWay& all() const DCOLL_REQUIRES(progress_.drive_mutex) { return progress_.under_way; }
  void forgive(Clock::time_point now, Clock::duration lost) DCOLL_REQUIRES(progress_.drive_mutex);
  void check_peers() const DCOLL_REQUIRES(progress_.drive_mutex);
  void watch_operation(Operation& running, Clock::time_point now) DCOLL_REQUIRES(progress_.drive_mutex);
  void watch_names(Clock::time_point now) DCOLL_REQUIRES(progress_.drive_mutex);
  void watch_points(Clock::time_point now) DCOLL_REQUIRES(progress_.drive_mutex);
  void watch_stall(Operation& operation, double idle, const std::vector<int>& missing) const
      DCOLL_REQUIRES(progress_.drive_mutex);
  void note_overdue(const Operation& operation, Clock::time_point now, const std::vector<int>& missing)
      DCOLL_REQUIRES(progress_.drive_mutex);
  void tell_of_overdue() DCOLL_REQUIRES(progress_.drive_mutex);
  [[noreturn]] void time_out(const Operation& operation, double idle, const std::vector<int>& missing)
      DCOLL_REQUIRES(progress_.drive_mutex);
  bool waits_for_work(Operation& running, Clock::time_point now, const std::vector<int>& missing)
      DCOLL_REQUIRES(progress_.drive_mutex);
  std::vector<int> culprits_of(const std::vector<int>& waited_for, double recent) const;
  [[noreturn]] void throw_stall(const std::string& what) const;
  std::shared_ptr<Operation> find(const Question& question) const DCOLL_REQUIRES(progress_.drive_mutex);
  std::vector<std::shared_ptr<Operation>> untold_names() const DCOLL_REQUIRES(progress_.drive_mutex);
  std::string last_operation() const DCOLL_REQUIRES(progress_.drive_mutex);
  double patience(const Operation& operation) const;
  std::vector<int> others() const;
  std::vector<int> sources_of(const Request& request) const;
  std::string wait_text(const Operation& operation, double seconds, const std::vector<int>& waited_for) const
      DCOLL_REQUIRES(progress_.drive_mutex);
  std::string timeout_text(const Operation& operation, double seconds, const std::vector<int>& waited_for) const
      DCOLL_REQUIRES(progress_.drive_mutex);

  const Setup& setup_;
  Progress& progress_;
  std::atomic<double> timeout_s_;
  AtWork work_ DCOLL_GUARDED_BY(progress_.drive_mutex);  // of the others, at the end of this rank's program
  Clock::time_point last_look_ DCOLL_GUARDED_BY(progress_.drive_mutex);
  Clock::time_point last_peer_check_ DCOLL_GUARDED_BY(progress_.drive_mutex);
  // When the others were last told that this rank waits in vain.
  Clock::time_point overdue_told_ DCOLL_GUARDED_BY(progress_.drive_mutex);
  // In this look: whom overdue operations wait for, and whether any is overdue of which that was not told.
  std::vector<int> overdue_ DCOLL_GUARDED_BY(progress_.drive_mutex);
  bool overdue_untold_ DCOLL_GUARDED_BY(progress_.drive_mutex) = false;
};

}  // namespace dcoll
