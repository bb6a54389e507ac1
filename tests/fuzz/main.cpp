// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fuzz_c_interface [--seconds T] [--seed N] [--case N]: calls of fulmen.h, drawn and damaged at
// random, for T seconds. A promise that is not kept, a crash or a hang ends the program with the
// number of its case, which --case shows and runs again.

#include <getopt.h>
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "fuzz/damage.h"
#include "fuzz/judge.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace fulmen::test {
namespace {

constexpr unsigned kLongestCase = 60;  // seconds: under a sanitizer, on a busy machine

// What a crash prints: text that is there already, by a function that a signal handler may call.
char the_case[512];

void say_case() {
  const ssize_t written = write(STDERR_FILENO, the_case, std::strlen(the_case));
  static_cast<void>(written);
}

void on_signal(int signal) {
  say_case();
  _exit(128 + signal);
}

void name_case(u64 number, const std::string& what) {
  std::snprintf(the_case, sizeof the_case,
                "case %llu died, hung or was stopped (%s); again: fuzz_c_interface --case %llu\n",
                static_cast<unsigned long long>(number), what.c_str(),
                static_cast<unsigned long long>(number));
}

struct Tally {
  i64 accepted = 0;
  i64 refused = 0;
};

// One case: a call, what was done to it, and how it is made.
class Case {
 public:
  Case(u64 number, Tally& tally, bool is_shown)
      : number_(number), call_(number), tally_(tally), is_shown_(is_shown) {}

  void run() {
    if (call_.operation == Operation::kBackward) run_forward_first();
    const i64 most = call_.random.chance(0.2) ? 0 : call_.random.number(1, 3);
    for (i64 i = 0; i < most; ++i) spoil();
    if (is_shown_) std::fprintf(stderr, "%s\n%s", damages_.c_str(), call_.text().c_str());
    const i64 way = call_.random.number(0, 9);
    if (way < 4) {
      run_simple();
    } else if (way < 8) {
      run_planned();
    } else if (way < 9) {
      run_dense_mask();
    } else {
      explain();
    }
  }

  const std::string& damages() const { return damages_; }

 private:
  void note(const std::string& what) {
    damages_ += (damages_.empty() ? "" : ", ") + what;
    name_case(number_, damages_);
  }
  void spoil() { note(damage(call_)); }
  bool is_good() const { return damages_.empty(); }

  // Fills o, lse and stats; gradients and their inputs are in the struct already, and ignored.
  void run_forward_first() {
    const int32_t accumulate = std::exchange(call_.problem->accumulate, 0);  // of the gradients
    const fulmen_status status = fulmen_attention(call_.problem, call_.tensors, nullptr);
    call_.problem->accumulate = accumulate;
    if (status == FULMEN_OK) return;
    throw Broken(sentence("a good forward call was refused: ", fulmen_last_error()));
  }

  // A call, judged; `again` makes it once more.
  template <class Call, class Again>
  void judge(const std::vector<fulmen_tensor>& outputs, const Blocks& scratch,
             const std::string& refused_for, const Call& make, const Again& again) {
    const Snapshot before(call_);
    const fulmen_status status = make();
    if (status != FULMEN_OK) {
      expect_refusal(status, is_good());
      before.expect_same("after a refusal", {});
      ++tally_.refused;
      return;
    }
    if (!refused_for.empty()) throw Broken(sentence("accepted, though ", refused_for));
    before.expect_kept(outputs, scratch);
    const Snapshot after(call_);
    if (call_.problem->accumulate != 0) {
      before.restore();  // what they hold is read
    } else {
      poison(outputs);
    }
    if (again() != FULMEN_OK) throw Broken(sentence("refused again: ", fulmen_last_error()));
    after.expect_same("when the call is made again", scratch);
    ++tally_.accepted;
  }

  fulmen_status simple(void* stream) {
    return call_.operation == Operation::kForward
               ? fulmen_attention(call_.problem, call_.tensors, stream)
               : fulmen_attention_backward(call_.problem, call_.tensors, stream);
  }

  void run_simple() {
    void* const stream = call_.random.chance(0.05) ? &call_ : nullptr;
    if (stream != nullptr) note("a stream");
    const auto make = [&] { return simple(stream); };
    judge(outputs_of(call_), {}, why_refused(call_), make, make);
  }

  // Where an array that the run uses is moved to: into the workspace.
  std::string move_into(const Block& workspace, size_t bytes) {
    const ArrayRule& rule = rules::kTable[call_.random.number(0, kNumArrays - 1)];
    fulmen_tensor& tensor = call_.at(rule.array);
    const Block* const from = block_of(call_, tensor);
    if (from == nullptr || from->bytes <= Block::kMarginBytes) return "";
    const size_t size = from->bytes - Block::kMarginBytes;
    if (tensor.data != from->begin() + Block::kMarginBytes || size > bytes) return "";
    char* const to = workspace.begin() + call_.random.number(0, static_cast<i64>(bytes - size));
    std::memcpy(to, tensor.data, size);
    tensor.data = to;
    note(sentence(name(rule.array), " in the workspace"));
    bool is_used = use_of(rule, call_of(call_.operation)) != Use::kIgnored;
    for (int axis = 0; axis < rule.list.count; ++axis) {  // 1 may stand for none
      is_used = is_used && call_.sizes[rule.list.axes[axis]] != 0;
    }
    return is_used ? sentence("the workspace overlaps ", name(rule.array)) : "";
  }

  void run_planned() {
    int never_set = 0;
    fulmen_plan* plan = reinterpret_cast<fulmen_plan*>(&never_set);
    if (call_.random.chance(0.1)) {
      call_.problem->device_name = call_.random.chance(0.5) ? "h200" : "a100";
      call_.problem->implementation = FULMEN_IMPLEMENTATION_AUTO;
      note("a GPU by name");
    }
    const std::string refused_for = why_refused(call_);
    const Snapshot before(call_);
    const fulmen_status status =
        fulmen_plan_create(call_.problem, call_.tensors, call_.c_operation(), &plan);
    before.expect_same("after fulmen_plan_create", {});
    if (status != FULMEN_OK) {
      expect_refusal(status, is_good());
      if (plan != nullptr) throw Broken("a plan that was refused is not NULL");
      ++tally_.refused;
      return;
    }
    if (!refused_for.empty()) throw Broken(sentence("a plan was made, though ", refused_for));
    struct Destroy {
      fulmen_plan* plan;
      ~Destroy() { fulmen_plan_destroy(plan); }
    } destroy{plan};
    run_plan(plan);
  }

  void run_plan(fulmen_plan* plan) {
    const size_t bytes = fulmen_plan_workspace_bytes(plan);
    const Block& workspace = call_.add_block(bytes);
    size_t given = bytes;
    char* at = workspace.begin();
    std::string refused_for;
    const i64 kind = call_.random.number(0, 9);
    if (kind == 0) {
      given -= bytes > 0;
      note("a small workspace");
    } else if (kind == 1) {
      at = nullptr;
      note("no workspace");
    } else if (kind < 5) {
      refused_for = move_into(workspace, bytes);
    } else if (kind < 6) {
      spoil();
    }
    if (refused_for.empty()) refused_for = why_refused(call_);
    const Block& other = call_.add_block(bytes);  // last: no array was moved there
    const auto run = [&](void* memory) {
      return call_.operation == Operation::kForward
                 ? fulmen_forward(plan, call_.tensors, memory, given, nullptr)
                 : fulmen_backward(plan, call_.tensors, memory, given, nullptr);
    };
    judge(
        outputs_of(call_), {&workspace, &other}, refused_for, [&] { return run(at); },
        [&] { return run(at == nullptr ? nullptr : other.begin()); });
  }

  void run_dense_mask() {
    const bool is_packed = call_.has(Array::kCuQ);
    const int64_t shape[4] = {call_.sizes[is_packed ? Axis::kSequence : Axis::kBatch],
                              call_.sizes[Axis::kHead], call_.sizes[Axis::kMaskQRow],
                              call_.sizes[Axis::kMaskKvRow]};
    const int64_t elements = shape[0] * shape[1] * shape[2] * shape[3];
    const Block& block = call_.add_block(static_cast<size_t>(elements));
    fulmen_tensor visible;
    fulmen_tensor_init(&visible, block.begin(), FULMEN_BOOL, 4, shape);
    if (call_.random.chance(0.1)) {
      visible.rank = static_cast<int32_t>(call_.random.number(-2, 6));
      note("rank of visible");
    }
    const auto make = [&] { return fulmen_dense_mask(call_.problem, call_.tensors, &visible); };
    judge({visible}, {}, why_refused(call_), make, make);
  }

  void explain() {
    const size_t capacity = static_cast<size_t>(call_.random.number(0, 3000));
    const Block& buffer = call_.add_block(capacity);
    size_t needed = 0;
    const Snapshot before(call_);
    const fulmen_status status =
        fulmen_explain(call_.problem, call_.tensors, call_.c_operation(),
                       capacity == 0 ? nullptr : buffer.begin(), capacity, &needed);
    before.expect_same("after fulmen_explain", {&buffer});
    if (status != FULMEN_OK) {
      expect_refusal(status, is_good());
      ++tally_.refused;
      return;
    }
    const std::string refused_for = why_refused(call_);
    if (!refused_for.empty()) throw Broken(sentence("explained, though ", refused_for));
    if (capacity > 0 && std::memchr(buffer.begin(), 0, capacity) == nullptr) {
      throw Broken("a text without an end");
    }
    ++tally_.accepted;
  }

  u64 number_;
  DrawnCall call_;
  Tally& tally_;
  bool is_shown_;
  std::string damages_;
};

bool run_case(u64 number, Tally& tally, bool is_shown = false) {
  name_case(number, "as drawn");
  alarm(kLongestCase);
  Case one(number, tally, is_shown);
  try {
    one.run();
    return true;
  } catch (const Broken& broken) {
    std::fprintf(stderr, "case %llu (%s): %s; again: fuzz_c_interface --case %llu\n",
                 static_cast<unsigned long long>(number), one.damages().c_str(), broken.what(),
                 static_cast<unsigned long long>(number));
    return false;
  }
}

struct Arguments {
  double seconds = std::getenv("FULMEN_TEST_FULL") != nullptr ? 60 : FULMEN_FUZZ_SECONDS;
  u64 seed = 1;
  bool is_one = false;  // the case `seed` alone
};

Arguments arguments_of(int argc, char** argv) {
  static const option kOptions[] = {{"seconds", required_argument, nullptr, 't'},
                                    {"seed", required_argument, nullptr, 's'},
                                    {"case", required_argument, nullptr, 'c'},
                                    {nullptr, 0, nullptr, 0}};
  Arguments arguments;
  for (int got; (got = getopt_long(argc, argv, "", kOptions, nullptr)) != -1;) {
    if (got == '?') std::exit(2);
    if (got == 't') arguments.seconds = std::atof(optarg);
    if (got != 't') arguments.seed = std::strtoull(optarg, nullptr, 10);
    arguments.is_one |= got == 'c';
  }
  return arguments;
}

void watch_for_crashes() {
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(say_case);
    signal(SIGALRM, on_signal);
    return;
  }
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM}) {
    signal(number, on_signal);
  }
}

int run(const Arguments& arguments) {
  setenv("FULMEN_NVRTC", "/nonexistent", 1);  // plans for GPUs are made, kernels are not compiled
  watch_for_crashes();
  Tally tally;
  if (arguments.is_one) return run_case(arguments.seed, tally, true) ? 0 : 1;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto start = now();
  const auto seconds = [&] { return std::chrono::duration<double>(now() - start).count(); };
  Random numbers(arguments.seed);
  while (seconds() < arguments.seconds) {
    if (!run_case(numbers.word(), tally)) return 1;
  }
  std::printf("fuzz_c_interface: seed %llu, %.0f s, %lld calls accepted, %lld refused\n",
              static_cast<unsigned long long>(arguments.seed), seconds(),
              static_cast<long long>(tally.accepted), static_cast<long long>(tally.refused));
  return tally.accepted > 0 && tally.refused > 0 ? 0 : 1;
}

}  // namespace
}  // namespace fulmen::test

int main(int argc, char** argv) {
  return fulmen::test::run(fulmen::test::arguments_of(argc, argv));
}
