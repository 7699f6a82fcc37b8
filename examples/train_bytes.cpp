// A language model of bytes, trained on a text file: learns, generates, and shows that the chunk and the
// recurrent form of the rule give its held-out loss alike. `train_bytes --help` says what it takes.
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include "kernels/kernels.hpp"
#include "support/arguments.hpp"
#include "support/checkpoint.hpp"
#include "support/progress.hpp"
#include "support/text.hpp"
#include "support/trigram.hpp"

using namespace examples;

namespace {

constexpr char usage[] =
    "usage: train_bytes [options] [TEXT]\n"
    "Trains a byte-level language model on the file TEXT but its last 10 %%, at most %zu bytes, which it is\n"
    "tested on.\n"
    "  --steps N           training steps (%lld)\n"
    "  --batch N           sequences a step (%lld)\n"
    "  --length N          bytes of a sequence (%lld)\n"
    "  --rate X            peak learning rate (%g)\n"
    "  --seed N            of weights, data and generation (%lld)\n"
    "  --threads N         (as many as the machine has)\n"
    "  --checkpoint FILE   save the run there, every %lld steps, at the end and on Ctrl-C\n"
    "  --resume            go on from --checkpoint, bit for bit; the options above but --threads must be "
    "those of then\n"
    "  --stop-at STEP      save the run before that step and stop\n"
    "  --loss-curve FILE   draw training and held-out loss as SVG\n"
    "  --generate N        bytes to generate (%lld)\n"
    "  --temperature X     of generation; 0: always the likeliest byte (%g)\n";

struct Arguments {
  std::string text = TRAIN_BYTES_TEXT;
  Index steps = 400, batch = 8, length = 256, seed = 1, generate = 400, stop_at = -1;
  int threads = std::max(1, int(std::thread::hardware_concurrency()));
  double rate = 3e-3, temperature = 0.7;
  std::string checkpoint, loss_curve;
  bool resume = false;
};
constexpr Index checkpoint_steps = 100;
constexpr std::size_t most_held_out = 100000;

Arguments parse(int argc, char** argv) {
  Arguments a;
  bool has_text = false;
  for (ArgumentReader reader(argc, argv); reader.next();) {
    const std::string& option = reader.option;
    const auto number = [&](auto& to, int lowest) {
      to = reader.number<std::remove_reference_t<decltype(to)>>(lowest);
    };
    if (option == "--steps")
      number(a.steps, 1);
    else if (option == "--batch")
      number(a.batch, 1);
    else if (option == "--length")
      number(a.length, 1);
    else if (option == "--rate")
      number(a.rate, 0);
    else if (option == "--seed")
      number(a.seed, 0);
    else if (option == "--threads")
      number(a.threads, 1);
    else if (option == "--checkpoint")
      a.checkpoint = reader.value();
    else if (option == "--resume")
      a.resume = true;
    else if (option == "--stop-at")
      number(a.stop_at, 0);
    else if (option == "--loss-curve")
      a.loss_curve = reader.value();
    else if (option == "--generate")
      number(a.generate, 0);
    else if (option == "--temperature")
      number(a.temperature, 0);
    else if (option.starts_with("-"))
      throw UsageError("unknown option " + option);
    else if (has_text)
      throw UsageError("more than one text");
    else
      a.text = option, has_text = true;
  }
  if (a.checkpoint.empty() && (a.resume || a.stop_at >= 0))
    throw UsageError(std::string(a.resume ? "--resume" : "--stop-at") + " needs --checkpoint");
  return a;
}

// log_mu is not clamped: layer.gates.min_log_mu stays absent.
constexpr ModelConfig config{.vocabulary = 256,
                             .blocks = 2,
                             .layer = {.hidden_size = 128, .num_heads = 2, .head_dim = 32, .head_v_dim = 64},
                             .mlp_size = 256};

volatile std::sig_atomic_t interrupted = 0;

// As text that no other number has.
std::string exact(double x) {
  char text[32];
  return {text, std::to_chars(text, std::end(text), x).ptr};
}

// From now on Ctrl-C asks the run to stop; a second one ends it at once.
void watch_interrupt() {
  struct sigaction action {};
  action.sa_handler = [](int) { interrupted = 1; };
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

// The mean of each `count` consecutive points.
Series smoothed(const Series& s, std::size_t count) {
  Series out{s.name, {}, {}};
  for (std::size_t begin = 0; begin < s.x.size(); begin += count) {
    const std::size_t end = std::min(s.x.size(), begin + count);
    double x = 0, y = 0;
    for (std::size_t i = begin; i < end; ++i) x += s.x[i], y += s.y[i];
    out.x.push_back(x / double(end - begin));
    out.y.push_back(y / double(end - begin));
  }
  return out;
}

// A byte drawn from the logits' softmax.
int draw(const Matrix<float>& logits, double temperature, Random& random) {
  Index best = 0;
  const double largest = logits.row(0).maxCoeff(&best);
  if (temperature == 0) return int(best);
  const Eigen::ArrayXd weights =
      ((logits.row(0).transpose().cast<double>().array() - largest) / temperature).exp();
  double left = random.uniform() * weights.sum();
  for (Index byte = 0; byte < weights.size(); ++byte)
    if ((left -= weights[byte]) < 0) return int(byte);
  return int(best);
}

// The prompt through the layers at once, then a byte at a time.
std::string generate(Model<float>& model, const std::string& prompt, const Arguments& a,
                     const md::Options& rule) {
  Random random(std::uint64_t(a.seed) + 2);
  Model<float>::Cache cache = model.make_cache();
  Batch batch{.B = 0, .T = Index(prompt.size()) - 1, .tokens = {}, .targets = {}};
  append_window(batch, prompt, 0);
  if (batch.T > 0) model.evaluate(batch, rule, &cache);
  std::string text;
  for (int byte = static_cast<unsigned char>(prompt.back()); Index(text.size()) < a.generate;) {
    byte = draw(model.step({&byte, 1}, cache, rule), a.temperature, random);
    text += char(byte);
  }
  return text;
}

// Bytes that would move a terminal's cursor, as \xNN.
std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(c));
    const bool control = static_cast<unsigned char>(c) < 32 || c == 127;
    out += control && c != '\n' && c != '\t' ? std::string(escape) : std::string(1, c);
  }
  return out;
}

int run(const Arguments& a) {
  const std::string text = read_text(a.text);
  const std::size_t split = text.size() - std::min(text.size() / 10, most_held_out);
  const std::string_view training = std::string_view(text).substr(0, split);
  if (training.size() <= std::size_t(a.length) + 1 || text.size() - split < 2)
    throw std::runtime_error(a.text + " has only " + std::to_string(text.size()) + " bytes");

  md::ThreadPool pool(a.threads);
  md::Workspace workspace;
  const md::Options rule{.executor = &pool, .workspace = &workspace};
  Model<float> model(config);
  Random initial(std::uint64_t(a.seed)), data(std::uint64_t(a.seed) + 1);
  model.initialize(initial);
  AdamW<float> optimizer(decays(model));
  const CosineSchedule schedule{
      .peak = a.rate, .floor = a.rate / 10, .warmup = std::min<Index>(50, a.steps), .steps = a.steps};

  RunState state;
  state.curves = {{"held out", {}, {}}, {"training", {}, {}}};
  state.settings = {{"steps", std::to_string(a.steps)},   {"batch", std::to_string(a.batch)},
                    {"length", std::to_string(a.length)}, {"rate", exact(a.rate)},
                    {"seed", std::to_string(a.seed)},     {"text", std::to_string(hash_of(text))}};
  if (a.resume) {
    try {
      load_checkpoint(a.checkpoint, model, optimizer, state);
    } catch (const std::runtime_error& e) {
      throw std::runtime_error(a.checkpoint + ": " + e.what());
    }
    data.move_to(state.data_position);
  }
  const auto save = [&] {
    state.data_position = data.position();
    save_checkpoint(a.checkpoint, model, optimizer, state);
  };
  const auto curve = [&](const std::string& name) -> Series& {
    return *std::find_if(state.curves.begin(), state.curves.end(),
                         [&](const Series& s) { return s.name == name; });
  };
  const auto record = [&](const std::string& name, double loss) {
    curve(name).x.push_back(double(state.step));
    curve(name).y.push_back(loss);
  };
  if (!a.checkpoint.empty()) watch_interrupt();
  std::printf("%s: %zu bytes to train on, %zu held out; %zu parameters, %d threads\n", a.text.c_str(), split,
              text.size() - split, model.parameters().size(), a.threads);
  std::fflush(stdout);

  const Index first = state.step, held_out_steps = std::max<Index>(1, a.steps / 16);
  Progress progress(first, a.steps);
  while (state.step < a.steps) {
    if (interrupted || state.step == a.stop_at) {
      progress.end();
      save();
      std::printf("stopped before step %lld; go on with --resume --checkpoint %s\n",
                  static_cast<long long>(state.step), a.checkpoint.c_str());
      return 0;
    }
    if (state.step % held_out_steps == 0)
      record("held out", loss_in_windows(model, text, split, a.batch, a.length, rule));

    const double loss = model.forward(random_windows(training, a.batch, a.length, data), rule).loss;
    model.backward(rule);
    clip_norm(model.gradients(), 1);
    optimizer.step(model.parameters(), model.gradients(), schedule.rate(state.step));
    record("training", loss);
    ++state.step;

    progress.update(state.step, loss, (state.step - first) * a.batch * a.length);
    if (!a.checkpoint.empty() && state.step % checkpoint_steps == 0 && state.step < a.steps) save();
  }
  progress.end();
  if (first < a.steps) record("held out", loss_in_windows(model, text, split, a.batch, a.length, rule));
  if (!a.checkpoint.empty()) save();
  const double trigram = Trigram(training).cross_entropy(text, split);
  if (!a.loss_curve.empty()) {
    const auto points = std::max<std::size_t>(1, std::size_t(a.steps) / 100);
    write_chart(a.loss_curve, {.title = "A byte-level language model on MomentumDeltaNet layers",
                               .x_label = "step",
                               .y_label = "loss, nats per byte",
                               .series = {smoothed(curve("training"), points),
                                          curve("held out"),
                                          {"held out, 3-gram", {0, double(a.steps)}, {trigram, trigram}}}});
  }

  if (a.generate > 0) {
    const std::string prompt = text.substr(split, 64);
    std::printf("\ngenerated after |, from the held-out text's beginning, at temperature %g:\n%s|%s\n",
                a.temperature, printable(prompt).c_str(),
                printable(generate(model, prompt, a, rule)).c_str());
  }

  // The held-out bytes, each predicted from all before it: one sequence, many times longer than in training.
  const auto held_out = [&](md::Algorithm algorithm) {
    md::Options options = rule;
    options.algorithm = algorithm;
    return loss_in_one_sequence(model, text, split, options);
  };
  const double chunk = held_out(md::Algorithm::chunk), recurrent = held_out(md::Algorithm::recurrent);
  const double difference = std::abs(chunk - recurrent);
  const bool agree = difference <= 1e-5;
  std::printf(
      "\nheld-out loss, log_mu unclamped: chunk form %.7f, recurrent form %.7f, difference %.1e: %s\n", chunk,
      recurrent, difference, agree ? "they agree" : "THEY DIFFER BY MORE THAN 1e-5");
  std::printf("\nheld-out text                nats/byte  bits/byte\n");
  for (const auto& [name, nats] : {std::pair("this model", recurrent), {"byte 3-gram, add-one", trigram}})
    std::printf("%-28s %9.4f  %9.4f\n", name, nats, nats / std::numbers::ln2);
  return agree ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (std::any_of(argv + 1, argv + argc, [](const std::string& s) { return s == "--help"; })) {
      const Arguments a;
      std::printf(usage, most_held_out, static_cast<long long>(a.steps), static_cast<long long>(a.batch),
                  static_cast<long long>(a.length), a.rate, static_cast<long long>(a.seed),
                  static_cast<long long>(checkpoint_steps), static_cast<long long>(a.generate),
                  a.temperature);
      return 0;
    }
    return run(parse(argc, argv));
  } catch (const UsageError& e) {
    std::fprintf(stderr, "train_bytes: %s; --help says more\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_bytes: %s\n", e.what());
    return 1;
  }
}
