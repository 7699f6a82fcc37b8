#include "../../examples/support/chart.hpp"

#include "../support/catch.hpp"

using namespace examples;

namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("ticks are round numbers within the range") {
  const auto near = [](const std::vector<double>& ticks, const std::vector<double>& expected) {
    REQUIRE(ticks.size() == expected.size());
    for (std::size_t i = 0; i < ticks.size(); ++i) CHECK(std::abs(ticks[i] - expected[i]) < 1e-9);
  };
  near(nice_ticks(0, 1), {0, 0.2, 0.4, 0.6, 0.8, 1});
  near(nice_ticks(1.2, 5.9), {2, 3, 4, 5});
  near(nice_ticks(0, 1000, 8), {0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000});
  near(nice_ticks(-0.3, 0.3), {-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3});
  near(nice_ticks(2, 2), {2});
}

TEST_CASE("a chart has a line and a name for each series, and escapes its text") {
  Chart chart{.title = "a < b & c", .x_label = "x", .y_label = "y", .series = {}};
  chart.series = {{"one", {1, 2, 4}, {0.5, std::nan(""), 1}}, {"two", {1, 4}, {0, 1}}};
  chart.points = true;
  const std::string text = svg(chart);
  CHECK(count(text, "<polyline") == 2);
  CHECK(count(text, "<circle") == 4);  // not the NaN
  CHECK(count(text, ">one<") == 1);
  CHECK(count(text, "a &lt; b &amp; c") == 1);
  CHECK(count(text, "nan") == 0);
  CHECK(text.ends_with("</svg>\n"));

  chart.names = Names::low;
  CHECK(count(svg(chart), ">two<") == 1);
  CHECK(svg(chart) != text);

  chart.log2_x = true;
  CHECK(count(svg(chart), ">3</text>") == 0);
  CHECK(count(svg(chart), ">4</text>") == 1);
  CHECK(count(svg(Chart{}), "nan") == 0);  // nothing to draw

  chart.log10_y = true;  // two's 0 has no logarithm
  chart.y_min = 1e-3, chart.y_max = 10;
  chart.series[1].colour = "#123456";
  CHECK(count(svg(chart), "<circle") == 3);
  CHECK(count(svg(chart), ">1e-2</text>") == 1);
  CHECK(count(svg(chart), "stroke=\"#123456\"") == 2);
  const std::string over = svg(chart);
  chart.names = Names::beside;
  CHECK(svg(chart) != over);
}

TEST_CASE("a chart that cannot be written is an error") {
  CHECK_THROWS_AS(write_chart("/nonexistent/chart.svg", Chart{}), std::runtime_error);
}
