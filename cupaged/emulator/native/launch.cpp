// The C interface that Python calls: which kernels there are, and one launch.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "machine.h"
#include "memory.h"

namespace emulator {

namespace {

KernelInfo* first_kernel = nullptr;

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kNumSignals = sizeof kSignals / sizeof kSignals[0];
constexpr std::size_t kSignalStackBytes = 64 << 10;

pthread_t launching;  // the thread that runs kernels
struct sigaction old_actions[kNumSignals];
struct sigaction old_interrupt;

// A fault of the processor inside a kernel becomes a finding. One of another thread, or of this
// one outside of a kernel, is not ours: the handler from before gets it when it happens again.
void on_fault(int signal, siginfo_t* info, void*) {
  if (machine.tracing && pthread_equal(pthread_self(), launching)) siglongjmp(machine.crashed, 1);
  if (!pthread_equal(pthread_self(), launching) || current == nullptr) {
    for (int i = 0; i < kNumSignals; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &old_actions[i], nullptr);
    }
    return;
  }
  const bool overflow = signal == SIGSEGV && machine.stacks.is_guard(info->si_addr);
  const bool division = signal == SIGFPE && info->si_code == FPE_INTDIV;
  const Kind kind = overflow ? Kind::stack_overflow : division ? Kind::undefined : Kind::crash;
  Finding& finding = begin_finding(kind, {nullptr, 0});
  finding.signal = signal;
  if (overflow) {
    say("the thread's stack of %zu KiB is full", kStackBytes >> 10);
  } else if (division) {  // checked code finds zeros before
    say("an integer division by zero, or of the smallest number by -1");
  } else {
    say("%s at address %p", strsignal(signal), info->si_addr);
  }
  trace();
  siglongjmp(machine.crashed, 1);
}

void on_interrupt(int) { machine.interrupted = true; }

class SignalGuard {
 public:
  SignalGuard() {
    stack_.ss_sp = std::malloc(kSignalStackBytes);
    stack_.ss_size = kSignalStackBytes;
    stack_.ss_flags = 0;
    sigaltstack(&stack_, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    launching = pthread_self();
    for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &action, &old_actions[i]);
    sigaction(SIGINT, nullptr, &old_interrupt);
    catches_interrupt_ = old_interrupt.sa_handler != SIG_IGN;
    if (catches_interrupt_) {
      action = {};
      action.sa_handler = on_interrupt;
      action.sa_flags = SA_ONSTACK;
      sigaction(SIGINT, &action, &old_interrupt);
    }
  }
  ~SignalGuard() {
    for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &old_actions[i], nullptr);
    if (catches_interrupt_) sigaction(SIGINT, &old_interrupt, nullptr);
    sigaltstack(&old_stack_, nullptr);
    std::free(stack_.ss_sp);
    if (machine.interrupted) raise(SIGINT);  // now to whom it was meant for
  }

 private:
  bool catches_interrupt_;
  stack_t stack_;
  stack_t old_stack_;
};

void run_grid() {
  const unsigned* grid = machine.spec->grid;
  const std::uint64_t num_blocks = std::uint64_t{grid[0]} * grid[1] * grid[2];
  // A shuffled grid is walked by a step without a common divisor: every block once.
  std::uint64_t& step = machine.grid_step;
  machine.grid_start = 0;
  step = 1;
  if (machine.spec->shuffle && num_blocks > 1) {
    machine.grid_start = draw() % num_blocks;
    auto common = [num_blocks](std::uint64_t a) {
      std::uint64_t b = num_blocks;
      while (b != 0) {
        const std::uint64_t rest = a % b;
        a = b;
        b = rest;
      }
      return a;
    };
    do {
      step = 1 + draw() % num_blocks;
    } while (common(step) != 1);
  }
  machine.first_block_number = machine.block_number + 1;
  for (std::uint64_t i = 0; i < num_blocks; ++i) {
    machine.block = nth_block(i);
    ++machine.block_number;
    run_block();
    if (machine.finding->kind != 0 || machine.interrupted) return;
  }
}

void run_launch(const LaunchSpec& spec, Finding& finding) {
  finding = {};
  machine.spec = &spec;
  machine.finding = &finding;
  ++machine.launch;
  machine.random = spec.seed * 2 + 0x9e3779b97f4a7c15ull;
  machine.wants_yield = machine.interrupted = false;
  machine.any_fence = false;
  machine.place = {nullptr, 0};
  machine.tracing = false;
  SignalGuard guard;
  if (sigsetjmp(machine.crashed, 1) == 0) {
    machine.stacks.use(spec.stacks);
    prepare_memory();
    begin_launch_memory();
    run_grid();
  }
  current = nullptr;
  std::fflush(stdout);
}

}  // namespace

Index3 nth_block(std::uint64_t i) {
  const unsigned* grid = machine.spec->grid;
  const std::uint64_t num_blocks = std::uint64_t{grid[0]} * grid[1] * grid[2];
  // The product of two numbers below 2^63 may need 128 bits.
  const auto number = static_cast<std::uint64_t>(
      (machine.grid_start + static_cast<unsigned __int128>(i) * machine.grid_step) % num_blocks);
  return {static_cast<unsigned>(number % grid[0]), static_cast<unsigned>(number / grid[0] % grid[1]),
          static_cast<unsigned>(number / grid[0] / grid[1])};
}

void register_kernel(KernelInfo* kernel) {
  kernel->next = first_kernel;
  first_kernel = kernel;
}

std::uint64_t clock_ticks() {
  if (machine.checked) return machine.num_steps;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<unsigned>(now.tv_nsec);
}

}  // namespace emulator

#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

EMULATOR_EXPORT const emulator::KernelInfo* emulator_first_kernel() {
  return emulator::first_kernel;
}

// What emulator_launch returns besides 0 and the error number of a failed system call.
constexpr int kInterrupted = -1;

static int run_isolated(const emulator::LaunchSpec& spec, emulator::Finding& finding) {
  void* shared = mmap(nullptr, sizeof(emulator::Finding), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return errno;
  auto* result = static_cast<emulator::Finding*>(shared);
  std::fflush(stdout);
  emulator::machine.interrupted = false;
  int status = 0;
  {
    emulator::SignalGuard guard;
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child < 0) {
      munmap(shared, sizeof(emulator::Finding));
      return errno;
    }
    if (child == 0) {
#ifdef __linux__
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
#endif
      signal(SIGINT, SIG_DFL);
      emulator::run_launch(spec, *result);
      _exit(0);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
      if (emulator::machine.interrupted) kill(child, SIGKILL);
    }
  }
  finding = *result;
  munmap(shared, sizeof(emulator::Finding));
  if (emulator::machine.interrupted) return kInterrupted;
  if (WIFSIGNALED(status)) {
    finding.kind = static_cast<int>(emulator::Kind::crash);
    finding.argument = -1;
    finding.signal = WTERMSIG(status);
    std::snprintf(finding.message, sizeof finding.message, "the process was ended by: %s",
                  strsignal(WTERMSIG(status)));
  }
  return 0;
}

// Runs a launch to its end or its first finding, whose kind is 0 if there is none.
EMULATOR_EXPORT int emulator_launch(const emulator::LaunchSpec* spec, emulator::Finding* finding,
                                    int checked) {
  emulator::machine.checked = checked != 0;
  if (spec->isolated) return run_isolated(*spec, *finding);
  emulator::run_launch(*spec, *finding);
  return emulator::machine.interrupted ? kInterrupted : 0;
}
