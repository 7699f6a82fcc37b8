# From the markdown that git hosting sites render to what Doxygen 1.9 reads. Outside of code,
#   $..$ and ```math    become formulas in Doxygen's marks;
#   # Heading           gets the label page, ## Heading the label that hosting sites give it, each made unique by
#                       the name of its file;
#   [text](target)      to a header of the library, a page or a heading becomes a reference, to any other file a
#                       path from the pages to where it lies.
# source: the project's folder, absolute; up: the same, relative to the pages.

FNR == 1 {
  page = substr(FILENAME, length(source) + 2)
  folder = page
  sub(/[^\/]*$/, "", folder)
}

/^```math$/ { math = 1; print "\\f["; next }
/^```/ && math { math = 0; print "\\f]"; next }
/^```/ { code = !code; print; next }
code || math { print; next }

{
  count = split($0, parts, "`")  # every second part is code
  line = outside(parts[1])
  for (i = 2; i <= count; i++) {
    tick = parts[i - i % 2] ~ /'/ ? "``" : "`"  # of code with a quote, which would end it
    line = line tick (i % 2 ? outside(parts[i]) : parts[i])
  }
  while (match(line, /\[`[^`]*`\]\(@ref/))  # the text of a reference is not read as markdown
    line = substr(line, 1, RSTART) substr(line, RSTART + 2, RLENGTH - 9) substr(line, RSTART + RLENGTH - 6)
  if (line ~ /^# / && page != "README.md") line = line " {#" label(page, "page") "}"
  if (line ~ /^##/) line = line " {#" label(page, slug($0)) "}"
  print line
}

function outside(text,  out) {
  while (match(text, /\$[^$]+\$/)) {
    out = out substr(text, 1, RSTART - 1) "\\f" substr(text, RSTART, RLENGTH - 1) "\\f$"
    text = substr(text, RSTART + RLENGTH)
  }
  text = out text
  out = ""
  while (match(text, /\]\([^) ]+\)/)) {
    out = out substr(text, 1, RSTART + 1) target(substr(text, RSTART + 2, RLENGTH - 3)) ")"
    text = substr(text, RSTART + RLENGTH)
  }
  return out text
}

function target(link,  file, at) {
  if (link ~ /^[a-z]+:/ || link ~ /\.svg$/) return link
  at = index(link, "#")
  file = at ? substr(link, 1, at - 1) : link
  file = file == "" ? page : folder file
  while (sub(/[^\/]+\/\.\.\//, "", file)) {}
  if (at && file ~ /\.md$/) return "@ref " label(file, substr(link, at + 1))
  if (file == "README.md") return "@ref index"
  if (file ~ /\.md$/) return "@ref " label(file, "page")
  if (file ~ /^include\/.*\.hpp$/) return "@ref " substr(file, length("include/") + 1)
  return up "/" file
}

function label(file, heading) {
  gsub(/[^A-Za-z0-9]/, "-", file)
  return file "-" heading
}

function slug(heading) {
  heading = tolower(heading)
  sub(/^#+ */, "", heading)
  gsub(/[^a-z0-9_ -]/, "", heading)
  gsub(/ /, "-", heading)
  return heading
}
