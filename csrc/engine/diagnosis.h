// Who does what while an operation stalls: a thread per process that sleeps until somebody asks, whatever the program
// is doing. It is woken through mapped memory; where ranks are on several nodes it also looks for itself now and then,
// for no MPI wakes a thread whose rank calls nothing.
//
//   1. Once an operation has waited for DCOLL_STALL_CHECK_TIME (the driver's watchdog sees that), the lowest of the
//      waiting ranks asks all others what they do. Which is the lowest nobody knows, so rank r waits r times
//      kStagger, and whoever is asked meanwhile leaves it to the asker, unless the asker is told that somebody makes
//      the report already. So there is one report per stall.
//   2. Each answers at once: whether it waits in the operation too, what it finished last, and where its program is.
//      For that it needs Python's lock, and waits for it only so long.
//   3. When all have answered, or its patience is at an end, the asker writes the report. Of a silent rank it knows
//   that
//      it took part in what the asker itself finished last.
//
// Questions and answers are notes of the job's transport (Transport::post_note), for process sets as well.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "engine/stall_report.h"
#include "transport/transport.h"

namespace dcoll {

class Communicator;
struct Operation;

class Diagnosis {
 public:
  // The user's line and the stack of a thread of the program (0: the main one), as take_stack() wants it; empty when
  // the program's lock could not be had for `limit`.
  using Program = std::function<std::string(uint64_t thread, std::chrono::milliseconds limit)>;

  // Of the communicator of all ranks, whose transport it uses; patience_s: see 3 above.
  Diagnosis(Communicator& job, double patience_s);
  ~Diagnosis();
  Diagnosis(const Diagnosis&) = delete;
  Diagnosis& operator=(const Diagnosis&) = delete;

  // Every communicator of the process, the job's included, from its making to its end.
  void add(Communicator& communicator);
  void remove(Communicator& communicator);
  void set_program(Program program);
  // An operation stalls somewhere: looks at once. Any thread, whatever it has locked.
  void stalls();
  // Ends the thread. Nothing is answered any more.
  void stop();

 private:
  // What this rank asked.
  struct Inquiry {
    Communicator* communicator;
    std::shared_ptr<Operation> operation;
    Question question;
    std::string text;         // the operation
    std::vector<int> others;  // ranks of the job
    std::map<int, Answer> answers;
    Clock::time_point deadline;
  };

  void run();
  bool look();
  void answer(int asker, const Question& question);
  uint64_t look_elsewhere(Answer& answer);
  void take(int rank, Answer answer);
  bool begin_inquiry();
  void end_inquiry();
  void ask_the_program(Answer& answer, uint64_t thread);

  Communicator& job_;
  const double patience_s_;
  std::mutex mutex_;  // guards what follows; never taken by a thread that holds a communicator's lock
  std::vector<Communicator*> communicators_;
  Program program_;
  std::unique_ptr<Inquiry> inquiry_;
  uint64_t questions_ = 0;

  std::atomic<bool> stalls_{false}, stop_{false};
  std::thread thread_;
};

}  // namespace dcoll
