// Who does what while an operation stalls: a thread per process that sleeps until somebody asks, whatever the program
// is doing. It is woken through mapped memory; where ranks are on several nodes it also looks for itself now and then,
// for no MPI wakes a thread whose rank calls nothing.
//
//   1. Once an operation has waited for DCOLL_STALL_CHECK_TIME (the driver's watchdog sees that), the lowest of the
//      waiting ranks asks all others what they do. Which is the lowest nobody knows, so rank r waits r times
//      kStaggerSeconds, and whoever is asked meanwhile leaves it to the asker, unless the asker is told that somebody
//      makes the report already. So there is one report per stall.
//   2. Each answers at once: whether it waits in the operation too, what it finished last, and where its program is.
//      For that it needs Python's lock, and waits for it only so long.
//   3. When all have answered, or its patience is at an end, the asker writes the report. Of a silent rank it knows
//      that it took part in what the asker itself finished last.
//
// Questions and answers are notes of the job's transport (Transport::post_note), for process sets as well.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/thread_safety.h"
#include "engine/watch/stall_report.h"
#include "transport/transport.h"

namespace dcoll {

struct Operation;

// An operation that stalls on this rank, and what to ask the others.
struct Stall {
  std::shared_ptr<Operation> operation;
  Question question;
  std::string text;
};

// What a communicator shows of itself.
class Watched {
 public:
  virtual ~Watched() = default;
  // How stalls tell the program's communicators apart, on every rank alike. The job's is 0.
  virtual uint64_t id() const = 0;
  virtual int rank() const = 0;
  // By rank, this one included: what messages call it, which is its number in the job.
  virtual std::vector<int> job_ranks() const = 0;
  // What stalls here, of either sequence, if it has for `stagger` seconds longer than DCOLL_STALL_CHECK_TIME and nobody
  // has told of it; `later`: something has not for that long.
  virtual std::optional<Stall> find_stall(double stagger, bool& later) = 0;
  // What this rank has to do with it, but for its program's stack; returns the thread that waits for it, 0: none.
  virtual uint64_t answer(const Question& question, int asker, Answer& answer) = 0;
  // Where a thread of the program waits for an operation of this communicator: which thread, and `text`: for what.
  virtual std::optional<uint64_t> waits_here(std::string& text) = 0;
  virtual void report_stall(Operation& operation, const std::string& text, const std::map<int, Answer>& answers,
                            const std::vector<int>& silent) = 0;
};

// The notes of a job.
class Notes {
 public:
  virtual ~Notes() = default;
  // False when it would have to wait for the driver.
  virtual bool take_notes(std::vector<Note>& notes) = 0;
  virtual void post_note(int peer, const std::string& text) = 0;
  virtual Transport& listens_on() = 0;
};

class Diagnosis {
 public:
  // The user's line and the stack of a thread of the program (0: the main one), as take_stack() wants it; empty when
  // the program's lock could not be had for `limit`.
  using Program = std::function<std::string(uint64_t thread, std::chrono::milliseconds limit)>;

  // `rank` of the job, whose notes it uses; patience_s: see 3 above.
  Diagnosis(Notes& job, int rank, double patience_s);
  ~Diagnosis();
  Diagnosis(const Diagnosis&) = delete;
  Diagnosis& operator=(const Diagnosis&) = delete;

  // Every communicator of the process, the job's included, from its making to its end.
  void add(Watched& communicator) DCOLL_EXCLUDES(mutex_);
  void remove(Watched& communicator) DCOLL_EXCLUDES(mutex_);
  void set_program(Program program) DCOLL_EXCLUDES(mutex_);
  // An operation stalls somewhere: looks at once. Any thread, whatever it has locked.
  void stalls();
  // Ends the thread. Nothing is answered any more.
  void stop();

 private:
  // What this rank asked.
  struct Inquiry {
    Watched* communicator;
    std::shared_ptr<Operation> operation;
    Question question;
    std::string text;         // the operation
    std::vector<int> others;  // ranks of the job
    std::map<int, Answer> answers;
    Clock::time_point deadline;
  };

  void run();
  bool look() DCOLL_EXCLUDES(mutex_);
  void answer(int asker, const Question& question) DCOLL_REQUIRES(mutex_);
  uint64_t look_elsewhere(Answer& answer) DCOLL_REQUIRES(mutex_);
  void take(int rank, Answer answer) DCOLL_REQUIRES(mutex_);
  bool begin_inquiry() DCOLL_REQUIRES(mutex_);
  void end_inquiry() DCOLL_REQUIRES(mutex_);
  void ask_the_program(Answer& answer, uint64_t thread) DCOLL_REQUIRES(mutex_);

  Notes& job_;
  const int rank_;
  const double patience_s_;
  Mutex mutex_;  // never taken by a thread that holds a communicator's lock
  std::vector<Watched*> communicators_ DCOLL_GUARDED_BY(mutex_);
  Program program_ DCOLL_GUARDED_BY(mutex_);
  std::unique_ptr<Inquiry> inquiry_ DCOLL_GUARDED_BY(mutex_);
  uint64_t questions_ DCOLL_GUARDED_BY(mutex_) = 0;

  std::atomic<bool> stalls_{false}, stop_{false};
  std::thread thread_;
};

}  // namespace dcoll
