// The train_bytes program as its users run it.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <vector>

#include "../../examples/support/random.hpp"
#include "../../examples/support/safetensors.hpp"
#include "../support/temporary.hpp"

namespace {

using test::TemporaryFolder;
using Arguments = std::vector<std::string>;

// The program, started; its output, standard error included, is read from a pipe.
class Program {
 public:
  explicit Program(Arguments arguments) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    arguments.insert(arguments.begin(), TRAIN_BYTES);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], 1);
      dup2(ends[1], 2);
      close(ends[0]);
      close(ends[1]);
      execv(argv[0], argv.data());
      _exit(127);
    }
    REQUIRE(pid_ > 0);
    close(ends[1]);
    pipe_ = ends[0];
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { close(pipe_); }

  void wait_for_output() { read_some(); }
  void interrupt() const { kill(pid_, SIGINT); }

  // Its exit status, and its whole output in `output`.
  int end() {
    while (read_some()) {
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  bool says(const std::string& text) const { return output.find(text) != std::string::npos; }

  std::string output;

 private:
  bool read_some() {
    char buffer[4096];
    const ssize_t n = read(pipe_, buffer, sizeof buffer);
    if (n > 0) output.append(buffer, std::size_t(n));
    return n > 0;
  }

  pid_t pid_;
  int pipe_;
};

std::string contents(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

std::string write_text(const TemporaryFolder& folder) {
  examples::Random random(1);
  std::ofstream out(folder.file("text"));
  for (int i = 0; i < 3000; ++i) out << char('a' + random.bits() % 7) << (i % 9 == 0 ? "\n" : "");
  return folder.file("text");
}

Arguments with(Arguments a, const Arguments& more) {
  a.insert(a.end(), more.begin(), more.end());
  return a;
}

const Arguments short_run = {"--steps", "6", "--batch", "2", "--length", "40", "--generate", "30"};

}  // namespace

TEST_CASE("train_bytes learns, generates, and its two forms agree; a resumed run is the same to the byte") {
  const TemporaryFolder folder;
  const std::string text = write_text(folder), curve = folder.file("curve.svg");

  Program whole(with(short_run, {"--checkpoint", folder.file("whole"), "--loss-curve", curve, text}));
  CHECK(whole.end() == 0);
  INFO(whole.output);
  CHECK(whole.says(": they agree\n"));
  CHECK(whole.says("step 6 of 6  loss "));
  CHECK(whole.says("byte 3-gram, add-one "));
  CHECK(whole.output.find_first_of("\r\033") == std::string::npos);  // no terminal, no redrawing
  CHECK(contents(curve).ends_with("</svg>\n"));

  const Arguments parts = with(short_run, {"--checkpoint", folder.file("parts"), text});
  Program begun(with(parts, {"--stop-at", "3"}));
  CHECK(begun.end() == 0);
  CHECK(begun.says("stopped before step 3"));
  CHECK(safetensors::read(folder.file("parts")).metadata.at("step") == "3");
  Program resumed(with(parts, {"--resume", "--threads", "3"}));
  CHECK(resumed.end() == 0);
  CHECK(bool(contents(folder.file("parts")) == contents(folder.file("whole"))));

  // What follows training depends on the checkpoint alone.
  const auto results = [](const Program& program) {
    return program.output.substr(program.output.find("generated after"));
  };
  CHECK(results(resumed) == results(whole));
}

TEST_CASE("Ctrl-C saves the run") {
  const TemporaryFolder folder;
  const Arguments run = {"--steps",      "100000",           "--batch",         "2", "--length", "40",
                         "--checkpoint", folder.file("run"), write_text(folder)};
  Program program(run);
  program.wait_for_output();
  program.interrupt();
  CHECK(program.end() == 0);
  INFO(program.output);
  CHECK(program.says("stopped before step "));
  const int step = std::stoi(safetensors::read(folder.file("run")).metadata.at("step"));
  CHECK(folder.files() == 2);

  Program resumed(with(run, {"--resume", "--stop-at", std::to_string(step + 2)}));
  CHECK(resumed.end() == 0);
  CHECK(safetensors::read(folder.file("run")).metadata.at("step") == std::to_string(step + 2));
}

TEST_CASE("train_bytes says why it cannot run: 2 for its arguments, 1 for files") {
  const TemporaryFolder folder;
  const std::string text = write_text(folder);
  const auto refused = [](const Arguments& arguments, int status, const std::string& why) {
    Program program(arguments);
    CHECK(program.end() == status);
    INFO(program.output);
    CHECK(program.says(why));
  };
  refused({"--steps"}, 2, "--steps needs a value");
  refused({"--steps", "0"}, 2, "--steps takes a number >= 1, not \"0\"");
  refused({"--steps", "1x"}, 2, "--steps takes a number >= 1, not \"1x\"");
  refused({"--rate", "nan"}, 2, "--rate takes a number >= 0, not \"nan\"");
  refused({"--temperature", "-1"}, 2, "--temperature takes a number >= 0");
  refused({"--step", "1"}, 2, "unknown option --step");
  refused({"--resume"}, 2, "--resume needs --checkpoint");
  refused({"--stop-at", "3"}, 2, "--stop-at needs --checkpoint");
  refused({text, text}, 2, "more than one text");
  refused({folder.file("absent")}, 1, "cannot read " + folder.file("absent"));
  refused({"--length", "5000", text}, 1, "has only 3334 bytes");
  refused(with(short_run, {"--checkpoint", folder.file("absent"), "--resume", text}), 1, "No such file");

  const Arguments run = with(short_run, {"--checkpoint", folder.file("run"), text});
  CHECK(Program(with(run, {"--stop-at", "0"})).end() == 0);
  refused(with(run, {"--resume", "--seed", "4"}), 1, "seed is 1, not 4");
  std::ofstream(text, std::ios::app) << "more";
  refused(with(run, {"--resume"}), 1, "text is ");

  Program help({"--help"});
  CHECK(help.end() == 0);
  CHECK(help.says("usage: train_bytes [options] [TEXT]"));
  CHECK(help.says("but its last 10 %, at most 100000 bytes"));
  CHECK(help.says("--temperature X     of generation; 0: always the likeliest byte (0.7)"));
}
