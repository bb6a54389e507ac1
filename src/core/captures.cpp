// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The expression of a call beside the arrays that it reads.

#include <vector>

#include "core/arrays.h"
#include "core/program.h"
#include "core/validate.h"

namespace fulmen {
namespace {

using expression::Expression;
using expression::Op;
using expression::Program;
using expression::Step;

std::string subject_of(int index, const std::string& word) {
  return sentence(name(capture(index)), " ('", word, "')");
}

void check_absent(const Arrays& arrays, int first, const char* why) {
  for (int index = first; index < kNumCaptures; ++index) {
    if (arrays[capture(index)].present()) refuse(sentence(name(capture(index)), why));
  }
}

void check_scalars(const Problem& problem, size_t count) {
  for (size_t index = count; index < problem.scalars.size(); ++index) {
    if (problem.scalars[index] == 0) continue;
    refuse(sentence("scalar", index, " is ", problem.scalars[index], ", but the expression has ",
                    count, " scalars; leave it 0"));
  }
}

// A read has an index for each axis; a bare name is of an array without axes, or of one element.
void check_read(const Problem& problem, const Arrays& given, const Program& program,
                const Step& read) {
  const Array array = capture(read.index);
  const Tensor& tensor = given[array];
  const std::string subject =
      subject_of(read.index, program.expression->names.captures[static_cast<size_t>(read.index)]);
  const bool is_bare = read.num_args == 0 && tensor.rank <= 1;
  if (!is_bare && tensor.rank != read.num_args) {
    throw Error(
        Status::kShape,
        sentence(subject, " has shape ", shape_text(tensor), ", but the expression reads it with ",
                 static_cast<int>(read.num_args), " indices; one for each axis is needed"));
  }
  const Tensor& normal = problem.arrays[array];
  if (is_bare && normal.shape[kMaxRank - 1] != 1) {
    throw Error(Status::kShape, sentence(subject, " has shape ", shape_text(tensor),
                                         ", but the expression reads it without an index; allowed "
                                         "is one element"));
  }
  const bool has_pairs =
      problem.num_sequences > 0 && problem.heads_q > 0 && problem.q_rows > 0 && problem.kv_rows > 0;
  if (!normal.empty() || !has_pairs) return;
  throw Error(Status::kShape, sentence(subject, " has shape ", shape_text(tensor),
                                       ", with no element to read; an axis has at least 1"));
}

void check_gradients(const Problem& problem, const Expression& expression) {
  for (int index = 0; index < kNumCaptures; ++index) {
    if (!problem.has(capture_gradient(index))) continue;
    const DType dtype = problem.arrays[capture(index)].dtype;
    if (is_float(dtype)) continue;
    throw Error(Status::kDType,
                sentence(name(capture_gradient(index)), " is asked for, but ",
                         subject_of(index, expression.names.captures[static_cast<size_t>(index)]),
                         " is ", name(dtype), "; gradients are of floating-point arrays"));
  }
}

}  // namespace

namespace {

std::shared_ptr<const Program> own_program(Problem& problem, const Request& request,
                                           const expression::SegmentTerms& segments) {
  const auto expression = expression::find(request.options.expression);
  const std::vector<std::string>& names = expression->names.captures;
  std::vector<DType> dtypes;
  for (int index = 0; index < static_cast<int>(names.size()); ++index) {
    const Tensor& tensor = request.arrays[capture(index)];
    if (!tensor.present()) {
      refuse(sentence(subject_of(index, names[static_cast<size_t>(index)]),
                      " is missing; the expression reads it"));
    }
    dtypes.push_back(tensor.dtype);
  }
  check_absent(request.arrays, static_cast<int>(names.size()),
               " is given, but the expression names fewer arrays");
  check_scalars(problem, expression->names.scalars.size());
  auto program = expression::compile(expression, dtypes, segments);
  for (const Step& step : program->steps) {
    if (step.op != Op::kRead || step.index == kAlibiRead) continue;
    check_read(problem, request.arrays, *program, step);
  }
  check_gradients(problem, *expression);
  return program;
}

// Beside segments the interval mask and ALiBi become part of the program.
expression::SegmentTerms take_segments(Problem& problem) {
  if (!problem.has_segments()) return {};
  for (const Array array : {Array::kQSegments, Array::kKvSegments}) {
    const i64 count = problem.num_segments(array);
    if (!problem.has(array) || (count >= 1 && count <= kMaxSegments)) continue;
    throw Error(Status::kShape,
                sentence(name(array), " has ", count, " segments; allowed are 1 to ", kMaxSegments,
                         ": those that follow each other are one"));
  }
  const bool has_slopes = problem.has(Array::kAlibiSlopes);
  const expression::SegmentTerms terms{true, problem.has(Array::kKvSegments), has_slopes,
                                       problem.arrays[Array::kAlibiSlopes].dtype, problem.mask};
  problem.mask = {};
  return terms;
}

}  // namespace

void apply_expression(Problem& problem, const Request& request) {
  problem.scalars = scalars_of(request.options);
  const expression::SegmentTerms segments = take_segments(problem);
  if (request.options.expression != 0) {
    problem.program = own_program(problem, request, segments);
    return;
  }
  check_absent(request.arrays, 0, " is given without an expression that reads it");
  check_scalars(problem, 0);
  if (segments.of_rows) problem.program = expression::compile(nullptr, {}, segments);
}

bool Problem::has_score_expression() const { return program != nullptr && program->score >= 0; }
bool Problem::has_mask_expression() const { return program != nullptr && program->mask >= 0; }

bool Problem::wants_captures() const {
  for (int index = 0; index < kNumCaptures; ++index) {
    if (has(capture_gradient(index))) return true;
  }
  return false;
}

bool Problem::expression_shows(const CacheSequence& sequence, i64 index, i64 head, i64 i,
                               i64 j) const {
  if (!has_mask_expression()) return true;
  std::vector<expression::Value> values(program->steps.size());
  evaluate(*program, program->mask_goal,
           expression::operands_of(*this, sequence, index, head, i, j), values.data());
  return values[static_cast<size_t>(program->mask)].integer != 0;
}

expression::Operands expression::operands_of(const Problem& problem, const CacheSequence& sequence,
                                             i64 index, i64 head, i64 i, i64 j) {
  Operands operands;
  const auto set = [&operands](Variable variable, i64 value) {
    operands.variables[static_cast<size_t>(variable)] = value;
  };
  set(Variable::kB, index);
  set(Variable::kH, head);
  set(Variable::kHk, problem.kv_head(head));
  set(Variable::kI, i);
  set(Variable::kJ, j);
  set(Variable::kP, problem.position(sequence, i));
  set(Variable::kQLen, sequence.shape.q_len);
  set(Variable::kKvLen, sequence.shape.kv_len);
  if (problem.has_segments()) {
    set(Variable::kQPosition, problem.q_position(index, i));
    set(Variable::kKvPosition, problem.kv_position(index, j));
  }
  operands.scalars = problem.scalars.data();
  operands.arrays = &problem.arrays;
  return operands;
}

}  // namespace fulmen
