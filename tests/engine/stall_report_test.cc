// What ranks ask and answer about a stall, the line that is made of it, who is to blame, and what ranks know of their
// last operation.
#include "engine/watch/stall_report.h"

#include "engine/core/call.h"
#include "engine/watch/last_operation.h"
#include "support/check.h"

namespace dcoll {
namespace {

using State = Answer::State;

Answer answer_of(State state, std::string operation, std::string_view lines) {
  Answer answer;
  answer.state = state;
  answer.operation = std::move(operation);
  take_stack(answer, lines);
  return answer;
}

}  // namespace

TEST(questions_and_answers_travel) {
  const Question asked{.id = 7, .set = ~uint64_t{0}, .operation = 1, .number = 2, .by_name = true};
  const auto question = decode_question(encode(asked));
  CHECK(question.has_value());
  CHECK_EQ(question->id, asked.id);
  CHECK_EQ(question->set, asked.set);
  CHECK_EQ(question->operation, asked.operation);
  CHECK_EQ(question->number, asked.number);
  CHECK(question->by_name);

  Answer given = answer_of(State::kElsewhere, "barrier for 3 s", "a.py:1 in f\nlib.py:9 in g\na.py:1 in f");
  given.question = 7;
  given.tells = true;
  const auto answer = decode_answer(encode(given));
  CHECK(answer.has_value());
  CHECK(answer->state == State::kElsewhere);
  CHECK(answer->tells);
  CHECK_EQ(answer->question, uint64_t{7});
  CHECK_EQ(answer->operation, given.operation);
  CHECK_EQ(answer->place, std::string("a.py:1 in f"));
  CHECK(answer->stack == (std::vector<std::string>{"lib.py:9 in g", "a.py:1 in f"}));
  Answer silent;
  silent.silence = "busy";
  CHECK(decode_answer(encode(silent))->stack.empty());

  for (const char* wrong : {"", "A", "Q", "Qx", "Ab07", "Ax07\x1f\x1f\x1f\x1f", "hello"}) {
    CHECK(!decode_question(wrong));
    CHECK(!decode_answer(wrong));
  }
}

TEST(one_line_says_it_all) {
  const Answer waits = answer_of(State::kWaits, "", "t.py:5 in step\nt.py:5 in step");
  const Answer busy = answer_of(State::kBusy, "finished barrier", "t.py:2 in load\nt.py:2 in load\nt.py:8 in f");
  CHECK_EQ(stall_report("barrier", 60.7, {{0, waits}, {1, busy}, {2, waits}}, {}, "barrier"),
           std::string("barrier stalls for 60 s. Missing: rank 1. Rank 1 finished barrier, now at t.py:2 in "
                       "load < t.py:8 in f. Waiting: ranks 0, 2 at t.py:5 in step."));
  Answer locked = answer_of(State::kBusy, "has finished no operation yet", "");
  locked.stack.clear();
  locked.silence = "busy in C";
  CHECK_EQ(stall_report("join", 2, {{3, waits}, {4, locked}}, {5, 6}, "barrier"),
           std::string("join stalls for 2 s. Missing: ranks 4, 5, 6. Rank 4 has finished no operation yet, now busy in "
                       "C. No answer from ranks 5, 6: stopped, ended or out of reach, after barrier. "
                       "Waiting: rank 3 at t.py:5 in step."));
  CHECK_EQ(stall_report("join", 2, {{1, waits}}, {0}, ""),
           std::string("join stalls for 2 s. Missing: rank 0. No answer from rank 0: stopped, ended or out of reach. "
                       "Waiting: rank 1 at t.py:5 in step."));
  CHECK_EQ(
      stall_report("join", 2, {{0, locked}, {1, locked}, {2, locked}, {3, locked}, {4, locked}, {5, waits}}, {}, "")
          .substr(0, 51),
      std::string("join stalls for 2 s. Missing: ranks 0, 1, 2, 3, 4. "));
  Answer passed = busy;
  passed.state = State::kPassed;
  CHECK_EQ(stall_report("barrier", 1, {{0, waits}, {1, passed}}, {}, ""),
           std::string("barrier stalls for 1 s. All ranks wait in it, or have done their part: a link between them may "
                       "be down. Waiting: rank 0 at t.py:5 in step."));
}

TEST(texts_are_cut_between_characters) {
  CHECK_EQ(shortened("abc", 3), std::string("abc"));
  CHECK_EQ(shortened("abcdef", 5), std::string("ab..."));
  CHECK_EQ(shortened("a\xc3\xa9z\xc3\xa9", 5), std::string("a..."));  // not in the middle of an e with an accent
}

TEST(the_last_operation_is_told_as_it_was_called) {
  LastOperation last;
  CHECK(!last.any());
  last.note(Call{.count = 4, .op = ReduceOp::kMax, .name = "x"});
  CHECK(last.any());
  CHECK_EQ(last.request().describe(), std::string("allreduce 'x' (max of 4 float32)"));
  last.note(Request{.kind = Kind::kBroadcast, .count = 3, .row_elems = 1, .root = 2});
  CHECK_EQ(last.request().describe(), std::string("broadcast (3 bytes of float32 from rank 2)"));
  last.note(Call{.count = 5, .dtype = DType::kFloat64});
  CHECK_EQ(last.request().describe(), std::string("allreduce (sum of 5 float64)"));
  last.note(Call{.kind = Kind::kAllGather, .row_elems = 8, .name = "y", .group = "2 tensors"});
  CHECK_EQ(last.request().describe(), std::string("allgather 'y' (2 tensors)"));
  last.note(Request{.kind = Kind::kBarrier});
  CHECK_EQ(last.request().describe(), std::string("barrier"));
}

TEST(who_only_waits_is_not_to_blame) {
  const auto now = Clock::now(), before = now - std::chrono::seconds(1);
  using Ranks = std::vector<int>;
  CHECK(culprits(0, {2, 1, 2}, {}, now) == (Ranks{1, 2}));
  // 1 waits for 2, which says nothing.
  CHECK(culprits(0, {1}, {{1, {2}, now}}, now) == Ranks{2});
  CHECK(culprits(1, {0, 2}, {{0, {2, 1}, now}}, now) == Ranks{2});
  // What was said long ago does not count.
  CHECK(culprits(0, {1}, {{1, {2}, before}}, now) == Ranks{1});
  // Everybody says to wait: those this rank sees nothing of.
  CHECK(culprits(0, {1}, {{1, {0}, now}}, now) == Ranks{1});
}

}  // namespace dcoll

TEST_MAIN
