#include "../../examples/support/checkpoint.hpp"

#include <filesystem>
#include <fstream>
#include <numbers>
#include <sstream>

#include "../../examples/kernels/kernels.hpp"
#include "../../examples/support/text.hpp"
#include "../../examples/support/trigram.hpp"
#include "../support/temporary.hpp"

using namespace examples;
using test::TemporaryFolder;

namespace {

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

bool says(const std::string& error, const std::string& text) {
  INFO(error);
  const bool found = error.find(text) != std::string::npos;
  CHECK(found);
  return found;
}

// A small training run on a text of its own.
struct Run {
  explicit Run(Index mlp_size = 6)
      : model({.vocabulary = 256,
               .blocks = 2,
               .layer = {.hidden_size = 8, .num_heads = 2, .head_dim = 4, .head_v_dim = 4},
               .mlp_size = mlp_size}),
        optimizer(decays(model)) {
    Random random(1);
    model.initialize(random);
    state.curves = {{"training", {}, {}}, {"empty", {}, {}}};
    state.settings = {{"seed", "2"}};
    for (int i = 0; i < 300; ++i) text += char('a' + random.bits() % 5);
  }

  void train_to(Index step) {
    for (; state.step < step; ++state.step) {
      const double loss = model.forward(random_windows(text, 2, 20, data)).loss;
      model.backward();
      clip_norm(model.gradients(), 0.5);
      optimizer.step(model.parameters(), model.gradients(),
                     CosineSchedule{.peak = 1e-2, .floor = 1e-3, .warmup = 2, .steps = 6}.rate(state.step));
      state.curves[0].x.push_back(double(state.step));
      state.curves[0].y.push_back(loss);
    }
  }
  void save(const std::string& path) {
    state.data_position = data.position();
    save_checkpoint(path, model, optimizer, state);
  }
  void load(const std::string& path) {
    load_checkpoint(path, model, optimizer, state);
    data.move_to(state.data_position);
  }

  Model<float> model;
  AdamW<float> optimizer;
  RunState state;
  Random data{2};
  std::string text;
};

}  // namespace

TEST_CASE("safetensors::write and read give back every byte") {
  const TemporaryFolder folder;
  const std::string path = folder.file("x.safetensors");
  safetensors::File file;
  const std::vector<float> values = {1, -0.0f, 1e-45f, std::numeric_limits<float>::infinity(), 3, 4};
  const std::vector<double> numbers = {std::numbers::pi};
  file.tensors.emplace("a.b", safetensors::Tensor::of<float>({2, 3}, values));
  file.tensors.emplace("scalar", safetensors::Tensor::of<double>({}, numbers));
  file.tensors.emplace("none", safetensors::Tensor::of<float>({0, 3}, {}));
  file.tensors.emplace("raw", safetensors::Tensor{"U8", {3}, {std::byte(1), std::byte(2), std::byte(255)}});
  file.metadata = {{"step", "7"}, {"quoted", "\"\\\n\xc3\xa4"}};
  for (int twice = 0; twice < 2; ++twice) {  // the second replaces the first
    safetensors::write(path, file);
    const safetensors::File back = safetensors::read(path);
    CHECK(back.metadata == file.metadata);
    REQUIRE(back.tensors.size() == file.tensors.size());
    for (const auto& [name, tensor] : file.tensors) {
      CHECK(back.tensors.at(name).dtype == tensor.dtype);
      CHECK(back.tensors.at(name).shape == tensor.shape);
      CHECK((back.tensors.at(name).bytes == tensor.bytes));  // Catch2 need not print bytes
    }
    CHECK(folder.files() == 1);
  }
  CHECK(safetensors::read(path).tensors.at("scalar").as<double>() == numbers);

  safetensors::write(path, {});
  CHECK(safetensors::read(path).tensors.empty());
}

TEST_CASE("safetensors::read judges the whole header before it reads or takes memory for a tensor") {
  const auto refused = [](const std::string& header, std::uint64_t data, const std::string& why) {
    const std::uint64_t size = header.size();
    std::istringstream in(std::string(reinterpret_cast<const char*>(&size), 8) + header);  // without the data
    says(error_of([&] { safetensors::read(in, 8 + size + data); }), why);
  };
  const auto entry = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
           "],\"data_offsets\":[" + offsets + "]}";
  };
  // Together they would be twice the file, and n such tensors n times the file.
  refused("{" + entry("a", "U8", "1099511627776", "0,1099511627776") + "," +
              entry("b", "U8", "1099511627775", "1,1099511627776") + "}",
          std::uint64_t(1) << 40, "b overlaps another tensor");
  for (const char* shape :
       {"2305843009213693952,0,2305843009213693952", "0,2305843009213693952,2305843009213693952",
        "2305843009213693952,2305843009213693952"})
    for (const char* dtype : {"U8", "U4"})  // the second is not known
      refused("{" + entry("a", dtype, shape, "0,0") + "}", 0, "a has an impossible shape");
  refused("{" + entry("", "U8", "0", "0,0") + "," + entry("", "U8", "0", "0,0") + "}", 0, "names  twice");
  const std::string open(1000000, '[');
  refused(open, 0, "not a JSON object");
  refused("{\"a\":" + open + std::string(open.size(), ']') + "}", 0, "entry for a needs");
}

TEST_CASE("safetensors::write refuses what is no file, and leaves the one that is there") {
  const TemporaryFolder folder;
  const std::string path = folder.file("x.safetensors");
  safetensors::File good;
  good.metadata["kept"] = "yes";
  safetensors::write(path, good);

  const auto refused = [&](const std::string& name, const safetensors::Tensor& tensor,
                           const std::string& why) {
    safetensors::File file;
    file.tensors.emplace(name, tensor);
    says(error_of([&] { safetensors::write(path, file); }), why);
    CHECK(safetensors::read(path).metadata == good.metadata);
    CHECK(folder.files() == 1);
  };
  const std::vector<std::byte> four(4);
  refused("x", {"F32", {2}, four}, "x should have 8 bytes by its shape, but has 4");
  refused("x", {"F31", {1}, four}, "x has the unknown dtype F31");
  refused("x", {"F32", {-1, -1}, four}, "x has a negative size");
  refused("__metadata__", {"F32", {1}, four}, "no tensor can be named __metadata__");
  const std::vector<float> two = {1, 2};
  says(error_of([&] { safetensors::Tensor::of<float>({3}, two); }), "has 2 values, not the 3 of its shape");

  says(error_of([&] { safetensors::write(folder.file("absent/x.safetensors"), good); }),
       "No such file or directory");
  std::filesystem::create_directories(folder.file("folder/full"));
  says(error_of([&] { safetensors::write(folder.file("folder"), good); }), "cannot replace");
  CHECK(folder.files() == 2);  // no temporary file stays
}

TEST_CASE("a run saved, loaded and continued is the run that never stopped, bit for bit") {
  const TemporaryFolder folder;
  Run whole;
  whole.train_to(6);
  whole.save(folder.file("whole"));

  Run begun;
  begun.train_to(3);
  begun.save(folder.file("half"));
  Run continued;
  continued.train_to(1);  // everything is replaced
  continued.load(folder.file("half"));
  CHECK(continued.state.step == 3);
  continued.train_to(6);
  continued.save(folder.file("continued"));

  // bool: Catch would print the files
  CHECK(bool(read_text(folder.file("continued")) == read_text(folder.file("whole"))));
  CHECK(bool(read_text(folder.file("half")) != read_text(folder.file("whole"))));
  CHECK(continued.state.curves[0].y == whole.state.curves[0].y);
}

TEST_CASE("a checkpoint that does not fit is refused by name, and nothing is assigned") {
  const TemporaryFolder folder;
  const std::string path = folder.file("x");
  Run run;
  run.train_to(2);
  run.save(path);
  const auto refused = [&](Run& other, std::initializer_list<const char*> reasons) {
    const std::vector<float> before(other.model.parameters().begin(), other.model.parameters().end());
    const std::string error = error_of([&] { other.load(path); });
    for (const char* reason : reasons) says(error, reason);
    CHECK(std::equal(before.begin(), before.end(), other.model.parameters().begin()));
    CHECK(other.state.step == 0);
  };
  Run wider(7);
  refused(wider, {"does not fit:", "model.layers.1.mlp.up_proj.weight has another shape",
                  "optimizer.v.model.layers.0.mlp.down_proj.weight has another shape"});
  Run seeded;
  seeded.state.settings["seed"] = "3";
  refused(seeded, {"seed is 2, not 3"});

  Run other;
  safetensors::File file = safetensors::read(path);
  file.tensors.erase("model.norm.weight");
  file.tensors.at("curve.training").shape = {file.tensors.at("curve.training").size()};
  file.metadata.erase("data_position");
  file.metadata["step"] = "2x";
  safetensors::write(path, file);
  refused(other, {"model.norm.weight is missing", "curve.training is missing or not [2, points] in F64",
                  "data_position is missing", "step is no number: 2x"});
  std::filesystem::resize_file(path, 1000);
  refused(other, {"is truncated"});
  std::filesystem::remove(path);
  refused(other, {"No such file"});
}

TEST_CASE("AdamW's steps are its formula's") {
  AdamW<double> optimizer({1, 0}, {.beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1});
  std::vector<double> w = {2, 2};
  double m = 0, v = 0, expected[] = {2, 2};
  for (int n = 1; n <= 3; ++n) {
    const double g = 0.3 * n - 0.5;
    optimizer.step(w, std::vector{g, g}, 0.01);
    m = 0.9 * m + 0.1 * g;
    v = 0.99 * v + 0.01 * g * g;
    const double move = m / (1 - std::pow(0.9, n)) / (std::sqrt(v / (1 - std::pow(0.99, n))) + 1e-8);
    expected[0] -= 0.01 * (move + 0.1 * expected[0]);
    expected[1] -= 0.01 * move;
    CHECK(std::abs(w[0] - expected[0]) < 1e-14);
    CHECK(std::abs(w[1] - expected[1]) < 1e-14);
  }
  CHECK_THROWS_AS(optimizer.step(w, std::vector<double>(3), 0.01), std::invalid_argument);
}

TEST_CASE("clipping bounds the norm, and refuses a gradient that is not finite") {
  std::vector<float> g = {3, 4};
  CHECK(clip_norm<float>(g, 6) == 5);
  CHECK(g == std::vector<float>{3, 4});
  CHECK(clip_norm<float>(g, 1) == 5);
  CHECK(std::abs(g[0] - 0.6f) < 1e-6f);
  CHECK(std::abs(g[1] - 0.8f) < 1e-6f);
  g[0] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_AS(clip_norm<float>(g, 1), std::runtime_error);
}

TEST_CASE("the schedule rises to its peak and falls to its floor") {
  const CosineSchedule schedule{.peak = 2, .floor = 0.5, .warmup = 4, .steps = 12};
  CHECK(schedule.rate(0) == 0.5);
  CHECK(schedule.rate(3) == 2);
  CHECK(schedule.rate(4) == 2);
  CHECK(std::abs(schedule.rate(8) - 1.25) < 1e-12);
  CHECK(schedule.rate(12) == 0.5);
  CHECK(schedule.rate(100) == 0.5);
  CHECK(CosineSchedule{.peak = 2, .floor = 0.5, .warmup = 0, .steps = 1}.rate(0) == 2);
}

TEST_CASE("the 3-gram model counts, smooths, and sums to 1") {
  const Trigram model("abcabdabc");
  CHECK(std::abs(model.log_probability('a', 'b', 'c') - std::log(3.0 / 259)) < 1e-12);
  CHECK(std::abs(model.log_probability('a', 'b', 'x') - std::log(1.0 / 259)) < 1e-12);
  CHECK(std::abs(model.log_probability('x', '\xff', 'x') - std::log(1.0 / 256)) < 1e-12);
  double sum = 0;
  for (int c = 0; c < 256; ++c) sum += std::exp(model.log_probability('a', 'b', char(c)));
  CHECK(std::abs(sum - 1) < 1e-12);
  CHECK(std::abs(model.cross_entropy("abc", 2) + std::log(3.0 / 259)) < 1e-12);
}

TEST_CASE("every byte from `begin` on counts once in the loss of a text, by windows or as one sequence") {
  Run run;
  const md::Options recurrent{.algorithm = md::Algorithm::recurrent};
  // Windows as long as the text are the text; shorter ones are the mean over their own losses.
  const double whole = loss_in_one_sequence(run.model, run.text, 250, recurrent);
  CHECK(std::abs(loss_in_one_sequence(run.model, run.text, 250, recurrent, 7) - whole) < 1e-6);
  CHECK(std::abs(loss_in_windows(run.model, run.text, 250, 3, 50, recurrent) - whole) < 1e-6);
  double sum = 0;
  for (const auto& [begin, end] : {std::pair(250, 270), {270, 290}, {290, 300}})
    sum += (end - begin) * loss_in_one_sequence(run.model,
                                                std::string_view(run.text).substr(0, std::size_t(end)),
                                                std::size_t(begin), recurrent);
  CHECK(std::abs(loss_in_windows(run.model, run.text, 250, 2, 20, recurrent) - sum / 50) < 1e-6);
}
