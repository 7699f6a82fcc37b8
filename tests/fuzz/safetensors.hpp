// A byte string as a .safetensors file: read, or refused with a std::runtime_error that says why.
#pragma once

#include <cstring>
#include <sstream>

#include "../../examples/support/case_file.hpp"
#include "../../examples/support/checkpoint.hpp"
#include "../../examples/support/layer_case.hpp"
#include "../../examples/support/scan_case.hpp"
#include "bytes.hpp"

namespace fuzz {

// Which file is made of the string: its own bytes, or those after a header size that fits, or a good one,
// which is then spoilt.
enum class Base { raw, header, rule, scan, layer, checkpoint };
inline constexpr const char* base_names[] = {"raw", "header", "rule", "scan", "layer", "checkpoint"};

inline constexpr const char* edit_names[] = {"number",  "string", "byte", "cut",   "insert",
                                             "nesting", "twice",  "size", "short", "long",
                                             "range",   "many",   "none"};
inline constexpr int edit_count = int(std::size(edit_names));

inline std::string file_text(const std::string& header, const std::string& data) {
  const std::uint64_t size = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &size, 8);
  return text + header + data;
}

// The file's header and data, by no code of the reader's or the writer's.
inline std::pair<std::string, std::string> parts_of(const safetensors::File& file) {
  nlohmann::json header = nlohmann::json::object();
  if (!file.metadata.empty()) header["__metadata__"] = file.metadata;
  std::string data;
  for (const auto& [name, tensor] : file.tensors) {
    const std::size_t begin = data.size();
    for (const std::byte byte : tensor.bytes) data += char(byte);
    header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return {header.dump(-1, ' ', true), data};
}

// Tensors that fit each other but for a size or a dtype, seldom.
inline safetensors::File case_of(Bytes& bytes, Base base) {
  using Shape = std::vector<std::int64_t>;
  const std::int64_t B = bytes.below(3), T = bytes.below(4), H = 1 + bytes.below(2), K = bytes.below(4),
                     V = bytes.below(4);
  safetensors::File file;
  const auto tensor = [&](const std::string& name, Shape shape, bool required, bool offsets = false) {
    const int choice = bytes.byte();
    if (!required && choice % 4 == 1) return;
    if (choice > 250) shape.push_back(1);
    if (choice > 245 && !shape.empty()) ++shape[0];
    const char* const dtypes[] = {"F32", "F64", "BF16", "F16", "I64", "U8"};
    const std::string dtype =
        offsets ? (choice % 2 == 0 ? "I64" : "I32") : dtypes[choice > 240 ? choice % 6 : choice % 4];
    safetensors::Tensor x{dtype, shape, {}};
    x.bytes.resize(std::size_t(x.size() * safetensors::dtype_size(dtype)));
    for (std::byte& byte : x.bytes) byte = std::byte(bytes.byte());
    file.tensors.emplace(name, std::move(x));
  };
  if (base == Base::rule) {
    const bool packed = bytes.flag();
    const Shape keys{B, T, H, K}, values{B, T, H, V}, gates{B, T, H}, state{packed ? 2 : B, H, K, V};
    for (const char* name : {"q", "k"}) tensor(name, keys, true);
    for (const char* name : {"p", "dq", "dk", "dp"}) tensor(name, keys, false);
    for (const char* name : {"v", "o", "do", "dv"}) tensor(name, values, *name == 'v');
    for (const char* name : {"log_alpha", "log_mu", "beta", "eta", "dlog_alpha", "dbeta"})
      tensor(name, gates, false);
    for (const char* name : {"initial_S", "initial_M", "final_S", "dfinal_M", "dinitial_S"})
      tensor(name, state, false);
    if (packed) tensor("cu_seqlens", {3}, true, true);
    if (bytes.flag()) file.metadata["scale"] = bytes.flag() ? "0.5" : "1e999";
  } else if (base == Base::layer) {
    const Shape tokens{B, T, 3}, state{B, 2 * H, 2, 1};
    for (const char* name : {"x", "dy", "y", "dx"}) tensor(name, tokens, name[0] == 'x');
    for (const char* name : {"initial_S", "initial_M", "final_S", "final_M"}) tensor(name, state, false);
    for (const char* name : {"weight.q_proj.weight", "dweight.q_proj.weight"})
      tensor(name, {2 * H, 3}, false);
    file.metadata = {{"kind", examples::layer_kind},
                     {"hidden_size", "3"},
                     {"num_heads", std::to_string(H)},
                     {"num_v_heads", std::to_string(2 * H)},
                     {"head_dim", "2"},
                     {"head_v_dim", "1"},
                     {"use_short_conv", "True"},
                     {"conv_size", "4"},
                     {"use_output_correction", "False"},
                     {"gate", bytes.flag() ? "swish" : "sigmoid"},
                     {"tau_factor", "1"},
                     {"norm_eps", "1e-5"},
                     {"min_log_mu", bytes.flag() ? "None" : "-2"}};
    const char* const values[] = {"", "0", "-1", "1e999", "nan", "9223372036854775807", "true", "None"};
    if (bytes.flag()) {
      const auto spoilt = std::next(file.metadata.begin(), bytes.below(int(file.metadata.size())));
      spoilt->second = values[bytes.below(int(std::size(values)))];
    }
  } else {
    const Shape tokens{B, T, H}, groups{B, T, 1, K}, state{B, H, K};
    for (const char* name : {"u", "delta"}) tensor(name, tokens, true);
    for (const char* name : {"z", "out", "dout", "du", "dz"}) tensor(name, tokens, false);
    for (const char* name : {"B", "C", "dB"}) tensor(name, groups, name[1] == 0);
    for (const char* name : {"A", "dA"}) tensor(name, {H, K}, *name == 'A');
    for (const char* name : {"D", "delta_bias", "dD"}) tensor(name, {H}, false);
    for (const char* name : {"initial_state", "final_state", "dinitial_state"}) tensor(name, state, false);
    file.metadata = {{"kind", "selective_scan"}};
    if (bytes.flag()) file.metadata["delta_softplus"] = bytes.flag() ? "True" : "true";
  }
  return file;
}

// A small training run, and what its checkpoint has.
struct Training {
  examples::Model<float> model{{.vocabulary = 2,
                                .blocks = 1,
                                .layer = {.hidden_size = 2, .num_heads = 1, .head_dim = 1, .head_v_dim = 2},
                                .mlp_size = 1}};
  examples::AdamW<float> optimizer{examples::decays(model)};
  examples::RunState state{.curves = {{"training", {1, 2}, {3, 4}}}, .settings = {{"seed", "2"}}};

  safetensors::File file() {
    safetensors::File file;
    const auto add = [&](const std::string& name, const std::vector<examples::Index>& shape,
                         std::span<float> w) {
      file.tensors.emplace(name, safetensors::Tensor::of<float>({shape.begin(), shape.end()}, w));
    };
    examples::detail::for_each_tensor(model, optimizer, add);
    file.tensors.emplace("curve.training",
                         safetensors::Tensor::of<double>({2, 2}, std::vector<double>{1, 2, 3, 4}));
    file.metadata = {{"step", "3"}, {"optimizer_steps", "3"}, {"data_position", "17"}, {"setting.seed", "2"}};
    return file;
  }
};

// Spoils a header or its data in one way.
inline void edit(Bytes& bytes, int how, std::string& header, std::string& data, std::string& text) {
  static constexpr const char* numbers[] = {"0",
                                            "1",
                                            "2",
                                            "8",
                                            "4294967296",
                                            "2305843009213693952",
                                            "4611686018427387903",
                                            "4611686018427387904",
                                            "9223372036854775807",
                                            "9223372036854775808",
                                            "18446744073709551615",
                                            "18446744073709551616",
                                            "1e30",
                                            "1e999",
                                            "-1",
                                            "-0",
                                            "1.5",
                                            "true",
                                            "null",
                                            "\"4\"",
                                            "[]",
                                            "{}"};
  static constexpr const char* strings[] = {
      "F32",          "F64", "I64", "BOOL", "F8_E4M3", "F31",  "",
      "__metadata__", "q",   "nan", "-",    "\\ud800", "\xff", "99999999999999999999"};
  const std::size_t at = std::size_t(bytes.word(2));
  // The n-th run of what `belongs`, counted around.
  const auto replace_run = [&](const auto& belongs, const std::string& by) {
    std::vector<std::pair<std::size_t, std::size_t>> runs;
    for (std::size_t i = 0; i < header.size(); ++i) {
      if (!belongs(header[i])) continue;
      if (runs.empty() || runs.back().second != i) runs.push_back({i, i});
      runs.back().second = i + 1;
    }
    if (runs.empty()) return;
    const auto [begin, end] = runs[at % runs.size()];
    header.replace(begin, end - begin, by);
  };
  const std::size_t position = header.empty() ? 0 : at % header.size();
  switch (how) {
    case 0:
      return replace_run([](char c) { return c >= '0' && c <= '9'; }, numbers[bytes.below(22)]);
    case 1:
      return replace_run(
          [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; },
          strings[bytes.below(14)]);
    case 2:
      if (!header.empty()) header[position] = char(bytes.byte());
      return;
    case 3:
      header.erase(position, 1 + bytes.below(64));
      return;
    case 4:
      header.insert(position, 1, "\"{}[],:0 "[bytes.below(9)]);
      return;
    case 5: {  // deep, and closed again or not
      const std::size_t depth = 1 + std::size_t(bytes.byte()) * 64;
      const char* const open[] = {"[", "{\"x\":"};
      const bool object = bytes.flag();
      std::string nested;
      for (std::size_t i = 0; i < depth; ++i) nested += open[object];
      nested += "1";
      if (bytes.flag()) nested += std::string(depth, object ? '}' : ']');
      return replace_run([](char c) { return c >= '0' && c <= '9'; }, nested);
    }
    case 6: {  // the first entry again
      const std::size_t end = header.find("},");
      if (header.size() > 1 && end != std::string::npos) header.insert(1, header.substr(1, end + 1));
      return;
    }
    case 7: {  // of the header
      if (text.size() < 8) return;
      const std::uint64_t size = bytes.flag() ? bytes.word(8) : std::uint64_t(bytes.byte());
      std::memcpy(text.data(), &size, 8);
      return;
    }
    case 8:
      text.resize(text.size() - std::min(text.size(), at % 64));
      return;
    case 9:
      text.append(1 + at % 64, char(bytes.byte()));
      return;
    case 10: {  // two tensors of one range, or nearly
      const std::string n = std::to_string(data.size());
      const std::string more =
          "\"x\":{\"dtype\":\"U8\",\"shape\":[" + n + "],\"data_offsets\":[0," + n + "]}";
      if (header.size() > 2) header.insert(1, more + ",");
      return;
    }
    case 11: {  // many tensors, each of nearly all the data
      std::string more;
      for (std::size_t i = 0; i < std::min<std::size_t>(data.size(), 200); ++i)
        more += "\"x" + std::to_string(i) + "\":{\"dtype\":\"U8\",\"shape\":[" +
                std::to_string(data.size() - i) + "],\"data_offsets\":[" + std::to_string(i) + "," +
                std::to_string(data.size()) + "]},";
      if (header.size() > 2) header.insert(1, more);
      return;
    }
    default:
      return;
  }
}

inline std::string make_file(Bytes& bytes, Reached* reached) {
  static Training training;
  static const auto checkpoint = parts_of(training.file());
  const Base base = Base(bytes.below(int(std::size(base_names))));
  const auto reach = [&](const std::string& name) {
    if (reached != nullptr) ++(*reached)[name];
  };
  reach(std::string("base ") + base_names[int(base)]);
  if (base == Base::raw || base == Base::header) {
    std::string text;
    for (int n = bytes.byte(); n > 0; --n) text += char(bytes.byte());
    return base == Base::raw ? text : file_text("{" + text, "data");
  }
  const int edits = bytes.below(4);
  std::array<std::pair<int, Bytes>, 3> choices{{{12, bytes}, {12, bytes}, {12, bytes}}};
  for (int i = 0; i < edits; ++i) {
    choices[std::size_t(i)] = {bytes.below(edit_count), bytes};
    bytes.word(4);  // what an edit reads at least, so that the next one's choices are other bytes
    reach(std::string("edit ") + edit_names[choices[std::size_t(i)].first]);
  }
  auto [header, data] = base == Base::checkpoint ? checkpoint : parts_of(case_of(bytes, base));
  std::string text;
  const auto is_of_text = [](int how) { return how >= 7 && how <= 9; };
  for (auto& [how, choice] : choices)
    if (!is_of_text(how)) edit(choice, how, header, data, text);
  text = file_text(header, data);
  for (auto& [how, choice] : choices)
    if (is_of_text(how)) edit(choice, how, header, data, text);
  return text;
}

// Throws Failure if a reader neither succeeds nor throws what it promises.
inline void check_safetensors(std::span<const std::uint8_t> string, Reached* reached = nullptr,
                              bool sabotage = false) {
  Bytes bytes(string);
  const std::string text = make_file(bytes, reached);
  const auto fail = [&](const std::string& what) {
    std::string start;
    for (const char c : text.substr(0, 2000)) start += c >= ' ' && c <= '~' ? c : '?';
    throw Failure(what + ": a file of " + std::to_string(text.size()) + " bytes: " + start);
  };
  // Returns whether it succeeds.
  const auto reads = [&](const std::string& what, const auto& read) {
    std::string outcome = "accepted";
    try {
      read();
    } catch (const std::runtime_error& e) {
      if (std::string(e.what()).empty()) fail(what + " does not say why");
      outcome = "refused";
    } catch (const std::exception& e) {
      fail(what + " throws no std::runtime_error: " + e.what());
    }
    if (reached != nullptr) ++(*reached)[what + " " + outcome];
    return outcome == "accepted";
  };
  const auto product = [](const std::vector<std::int64_t>& shape) {
    std::uint64_t n = 1;
    for (const std::int64_t d : shape) n *= std::uint64_t(d);
    return n;
  };

  safetensors::File file;
  std::istringstream in(text);
  if (!reads("read", [&] { file = safetensors::read(in, text.size()); })) return;
  if (sabotage) file.tensors["more"] = {"F32", {2}, {}};
  std::size_t total = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const auto element = std::uint64_t(safetensors::dtype_size(tensor.dtype));
    total += tensor.bytes.size();
    if (std::uint64_t(tensor.size()) != product(tensor.shape)) fail(name + "'s size is not its shape's");
    if (element != 0 && product(tensor.shape) * element != tensor.bytes.size())
      fail(name + "'s bytes are not its shape's");
  }
  if (total + 8 > text.size()) fail("the tensors have more bytes than the file");
  const auto [header, data] = parts_of(file);
  const std::string again_text = file_text(header, data);
  std::istringstream again_in(again_text);
  const safetensors::File again = safetensors::read(again_in, again_text.size());
  if (again.metadata != file.metadata || again.tensors.size() != file.tensors.size())
    fail("written again, it is another file");
  for (const auto& [name, tensor] : again.tensors)
    if (!file.has(name) || tensor.bytes != file.tensors.at(name).bytes)
      fail("written again, " + name + " differs");

  const auto whole = [&](const auto& x) {
    if (!x.absent() && product(x.shape) != x.values.size()) fail("an array's values are not its shape's");
  };
  reads("read_case", [&] {
    const examples::Case c = examples::read_case(file);
    examples::Gradients<double>::for_each([&](const char*, auto get, auto get_input) {
      whole(get(c.gradients));
      whole(get_input(c.problem));
    });
    for (const auto* x : {&c.expected.o, &c.expected.final_S, &c.expected.final_M}) whole(*x);
  });
  reads("read_scan_case", [&] {
    const examples::ScanCase c = examples::read_scan_case(file);
    examples::ScanGradients<double>::for_each([&](const char*, auto get, auto get_input) {
      whole(get(c.gradients));
      whole(get_input(c.problem));
    });
  });
  reads("read_layer_case", [&] {
    const examples::LayerCase c = examples::read_layer_case(file);
    for (const auto* tensors : {&c.tensors, &c.values, &c.gradients})
      for (const auto& [name, x] : *tensors) whole(x);
  });
  Training run;
  run.state.step = 42;
  const bool loaded =
      reads("load_checkpoint", [&] { examples::load_checkpoint(file, run.model, run.optimizer, run.state); });
  const bool untouched = run.state.step == 42 && run.state.curves[0].x.size() == 2 &&
                         std::all_of(run.model.parameters().begin(), run.model.parameters().end(),
                                     [](float w) { return w == 0; });
  if (!loaded && !untouched) fail("a refused checkpoint was assigned");
  if (loaded && run.state.curves[0].x.size() != run.state.curves[0].y.size()) fail("half a curve was loaded");
}

}  // namespace fuzz
