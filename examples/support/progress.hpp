// How far a training run is: a bar redrawn in place where standard error is a terminal, else a plain line now
// and then.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace examples {

class Progress {
 public:
  // Of a run from step `first` to `last`.
  Progress(std::int64_t first, std::int64_t last)
      : first_(first), last_(last), terminal_(isatty(fileno(stderr)) != 0) {}

  // Steps [first, done) have been made, on so many tokens since `first`.
  void update(std::int64_t done, double loss, std::int64_t tokens) {
    const Clock::time_point now = Clock::now();
    const Clock::duration pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
    if (done != last_ && now - shown_ < pause) return;
    shown_ = now;
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    const double left = elapsed * double(last_ - done) / double(done - first_);
    char text[160];
    std::snprintf(text, sizeof text, "step %lld of %lld  loss %.3f  %.0f tokens/s  %d:%02d left",
                  static_cast<long long>(done), static_cast<long long>(last_), loss, double(tokens) / elapsed,
                  int(left) / 60, int(left) % 60);
    if (terminal_) {
      const auto filled = std::size_t(24 * done / last_);
      std::fprintf(stderr, "\r[%s%s] %s\033[K", std::string(filled, '#').c_str(),
                   std::string(24 - filled, '.').c_str(), text);
      drawn_ = true;
    } else {
      std::fprintf(stderr, "%s\n", text);
    }
    std::fflush(stderr);
  }

  // Ends the bar's line, so that other output can follow.
  void end() {
    if (drawn_) std::fputc('\n', stderr);
    drawn_ = false;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t first_, last_;
  bool terminal_, drawn_ = false;
  Clock::time_point start_ = Clock::now(), shown_{};
};

}  // namespace examples
