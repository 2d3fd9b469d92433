#include "engine/watch/stall_report.h"

#include <algorithm>
#include <charconv>
#include <locale>
#include <sstream>

#include "base/ranks_text.h"

namespace dcoll {
namespace {

constexpr char kQuestion = 'Q', kAnswer = 'A';
constexpr char kField = '\x1f', kFrame = '\n';
constexpr size_t kMostNamed = 4;  // missing ranks that are told of in full

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  for (;;) {
    const size_t end = text.find(at);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string joined(const std::vector<std::string>& parts, std::string_view between) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) text += (i ? std::string(between) : "") + parts[i];
  return text;
}

// "rank 0 at a.py:1 in f; ranks 2, 3 at b.py:2 in g": where those are that wait, ranks of one place together.
std::string places(const std::map<int, Answer>& answers) {
  std::map<std::string, std::vector<int>> ranks_at;
  std::vector<std::string> parts;
  for (const auto& [rank, answer] : answers) {
    if (answer.state != Answer::State::kWaits) continue;
    ranks_at[answer.place.empty() ? answer.silence : "at " + answer.place].push_back(rank);
  }
  for (const auto& [place, ranks] : ranks_at) {
    parts.push_back(ranks_text(ranks) + (place.empty() ? "" : (place.starts_with("at ") ? " " : ": ") + place));
  }
  return joined(parts, "; ");
}

std::string of_missing(int rank, const Answer& answer) {
  const bool elsewhere = answer.state == Answer::State::kElsewhere;
  std::string text = "Rank " + std::to_string(rank) + (elsewhere ? " waits in " : " ") + answer.operation;
  return text + ", now " + (answer.stack.empty() ? answer.silence : "at " + joined(answer.stack, " < "));
}

}  // namespace

std::string shortened(const std::string& text, size_t most) {
  return text.size() <= most ? text : text.substr(0, whole_characters(text, most - 3)) + "...";
}

std::string encode(const Question& q) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // no thousands separators, whatever the program's locale
  text << kQuestion << q.id << ' ' << q.set << ' ' << q.operation << ' ' << q.number << ' ' << q.by_name;
  return text.str();
}

std::optional<Question> decode_question(std::string_view note) {
  if (note.empty() || note.front() != kQuestion) return std::nullopt;
  std::istringstream text{std::string(note.substr(1))};
  text.imbue(std::locale::classic());
  Question q;
  if (!(text >> q.id >> q.set >> q.operation >> q.number >> q.by_name)) return std::nullopt;
  return q;
}

std::string encode(const Answer& a) {
  return std::string{kAnswer, static_cast<char>(a.state), a.tells ? '1' : '0'} + std::to_string(a.question) + kField +
         shortened(a.operation, 300) + kField + shortened(a.silence, 100) + kField + shortened(a.place, 300) + kField +
         joined(a.stack, std::string(1, kFrame));
}

std::optional<Answer> decode_answer(std::string_view note) {
  constexpr size_t kHead = 3, kFields = 5;
  if (note.size() <= kHead || note.front() != kAnswer) return std::nullopt;
  const std::vector<std::string> fields = split(note.substr(kHead), kField);
  if (fields.size() != kFields || std::string_view("wpeb").find(note[1]) == std::string_view::npos) return std::nullopt;
  Answer a;
  a.state = static_cast<Answer::State>(note[1]);
  a.tells = note[2] == '1';
  std::from_chars(fields[0].data(), fields[0].data() + fields[0].size(), a.question);
  a.operation = fields[1];
  a.silence = fields[2];
  a.place = fields[3];
  if (!fields[4].empty()) a.stack = split(fields[4], kFrame);
  return a;
}

void take_stack(Answer& answer, std::string_view lines) {
  answer.stack = split(lines, kFrame);
  answer.place = answer.stack.front();
  answer.stack.erase(answer.stack.begin());
}

std::string stall_report(const std::string& operation, double seconds, const std::map<int, Answer>& answers,
                         const std::vector<int>& silent, const std::string& before) {
  std::vector<std::string> missing;
  std::vector<int> absent;
  for (const auto& [rank, answer] : answers) {
    if (answer.state != Answer::State::kBusy && answer.state != Answer::State::kElsewhere) continue;
    absent.push_back(rank);
    if (absent.size() <= kMostNamed) missing.push_back(of_missing(rank, answer));
  }
  if (absent.size() > kMostNamed) missing.push_back("And others");
  if (!silent.empty()) {
    missing.push_back("No answer from " + ranks_text(silent) + ": stopped, ended or out of reach" +
                      (before.empty() ? "" : ", after " + before));
    absent.insert(absent.end(), silent.begin(), silent.end());
  }
  std::string text = operation + " stalls for " + std::to_string(static_cast<int64_t>(seconds)) + " s. ";
  text += absent.empty() ? "All ranks wait in it, or have done their part: a link between them may be down"
                         : "Missing: " + ranks_text(absent) + ". " + joined(missing, ". ");
  return text + ". Waiting: " + places(answers) + ".";
}

std::vector<int> culprits(int own, std::vector<int> waits_for, const std::vector<StallNote>& notes,
                          Clock::time_point since) {
  std::vector<int> blamed = waits_for, waiting{own};
  for (const StallNote& note : notes) {
    if (note.heard < since) continue;
    waiting.push_back(note.rank);
    blamed.insert(blamed.end(), note.waits_for.begin(), note.waits_for.end());
  }
  std::erase_if(blamed, [&](int rank) { return std::find(waiting.begin(), waiting.end(), rank) != waiting.end(); });
  if (blamed.empty()) blamed = std::move(waits_for);
  sort_once(blamed);
  return blamed;
}

}  // namespace dcoll
