# The kernel of R: evaluates cells in the global environment. See evaluator.py for the messages.
#
# Base R only, so that any installation of R will do. Interrupts are suspended but for the code of a cell. The two
# descriptors are opened anew for each message, since a program may close all connections (`closeAllConnections`).

.kernel <- new.env(parent = baseenv())
local({
  REQUESTS <- "/dev/fd/60"
  REPORTS <- "/dev/fd/61"
  MAX_VARIABLES <- 1000L
  MAX_PREVIEW <- 200L
  MAX_TABLE <- c(60L, 20L)  # rows and columns of a table as HTML
  MAX_CALLS <- 40L          # of a traceback
  PLOT_INCHES <- c(7, 5)
  PLOT_RESOLUTION <- 100

  count <- 0L
  plots <- NULL     # the pattern of the running cell's plots
  shown <- 0L       # how many of them were displayed

  # ---- messages

  as_bytes <- function(text) if (is.raw(text)) text else charToRaw(enc2utf8(as.character(text)))
  size_of <- function(n) writeBin(as.integer(n), raw(), endian = "big")

  receive <- function() {
    incoming <- file(REQUESTS, "rb", raw = TRUE)
    on.exit(close(incoming))
    size <- function() readBin(incoming, "integer", 1L, endian = "big")
    lapply(seq_len(size()), function(each) readBin(incoming, "raw", size()))
  }

  send <- function(...) {
    parts <- lapply(c(...), as_bytes)
    message <- unlist(c(list(size_of(length(parts))), lapply(parts, function(part) list(size_of(length(part)), part))))
    outgoing <- file(REPORTS, "wb", raw = TRUE)
    on.exit(close(outgoing))
    writeBin(message, outgoing)
  }

  as_text <- function(bytes) {
    text <- rawToChar(bytes[bytes != 0])
    Encoding(text) <- "UTF-8"
    text
  }

  display <- function(bundle, main = FALSE) suspendInterrupts({
    pairs <- lapply(names(bundle), function(type) list(type, bundle[[type]]))
    send(list("display", if (main) "main" else ""), unlist(pairs, recursive = FALSE))
    receive()
  })

  # ---- values

  show_value <- function(value, main) {
    text <- paste(utils::capture.output(if (isS4(value)) methods::show(value) else print(value)), collapse = "\n")
    if (!nzchar(text)) return()
    bundle <- list("text/plain" = text)
    if (is.data.frame(value) || is.matrix(value)) {
      table <- tryCatch(as_table(value), error = function(problem) NULL)
      if (!is.null(table)) bundle[["text/html"]] <- table
    }
    display(bundle, main)
  }

  escape <- function(text) {
    text <- gsub("&", "&amp;", text, fixed = TRUE)
    gsub(">", "&gt;", gsub("<", "&lt;", text, fixed = TRUE), fixed = TRUE)
  }

  as_table <- function(value) {
    size <- dim(value)
    rows <- seq_len(min(size[1], MAX_TABLE[1]))
    columns <- seq_len(min(size[2], MAX_TABLE[2]))
    head <- as.data.frame(value[rows, columns, drop = FALSE])
    if (is.matrix(value) && is.null(colnames(value))) names(head) <- paste0("[,", columns, "]")
    cells <- vapply(head, function(column) escape(format(column)), character(length(rows)))
    cells <- matrix(cells, nrow = length(rows))
    cell <- function(tag, text) paste0("<", tag, ">", text, "</", tag, ">", collapse = "")
    lines <- vapply(rows, function(row) {
      paste0("<tr><th>", escape(row.names(head)[row]), "</th>", cell("td", cells[row, ]), "</tr>")
    }, "")
    note <- if (any(size > MAX_TABLE)) paste0("<p>", size[1], " rows, ", size[2], " columns</p>")
    paste0("<table><thead><tr><th></th>", cell("th", escape(names(head))), "</tr></thead><tbody>",
           paste(lines, collapse = ""), "</tbody></table>", note)
  }

  # ---- plots: one device for a cell, opened by the first plot; a page of it is a file

  open_device <- function(...) {
    plots <<- file.path(tempdir(), sprintf("cell%d-%%03d.png", count))
    kind <- if (capabilities("cairo")) "cairo" else getOption("bitmapType")
    grDevices::png(plots, PLOT_INCHES[1], PLOT_INCHES[2], "in", res = PLOT_RESOLUTION, type = kind)
  }

  # Displays the pages that are complete: all but the newest, until the device is closed.
  show_plots <- function(all) {
    if (is.null(plots)) return()
    if (all) close_device()
    repeat {
      path <- sprintf(plots, shown + 1L)
      complete <- if (all) path else sprintf(plots, shown + 2L)
      if (!file.exists(path) || !file.exists(complete)) return()
      shown <<- shown + 1L
      display(list("image/png" = readBin(path, "raw", file.size(path))))
      unlink(path)
    }
  }

  close_device <- function() {
    for (number in grDevices::dev.list()) {
      if (identical(attr(.Devices[[number]], "filepath"), plots)) grDevices::dev.off(number)
    }
  }

  # ---- cells

  evaluate <- function(code) {
    lines <- strsplit(code, "\n", fixed = TRUE)[[1]]
    if (!length(lines)) return()
    source <- srcfilecopy(paste0("[cell ", count, "]"), lines)
    expressions <- tryCatch(parse(text = lines, keep.source = TRUE, srcfile = source), error = function(problem) {
      stop(simpleError(conditionMessage(problem)))
    })
    for (at in seq_along(expressions)) {
      result <- withVisible(eval(expressions[at], globalenv()))
      show_plots(all = FALSE)
      if (result$visible) show_value(result$value, main = at == length(expressions))
    }
  }

  # The call of a condition; none where the cell itself has raised it.
  own_call <- function(problem) {
    call <- conditionCall(problem)
    if (!identical(call, quote(eval(expressions[at], globalenv())))) call
  }

  warn <- function(problem) {
    if (is.null(conditionCall(problem)) || !is.null(own_call(problem))) return()
    warning(simpleWarning(conditionMessage(problem)))
    invokeRestart("muffleWarning")
  }

  describe_call <- function(call) {
    from <- attr(call, "srcref")
    place <- if (is.null(from)) "" else paste0(attr(from, "srcfile")$filename, ":", from[1], ": ")
    paste0("  at ", place, substr(paste(deparse(call, nlines = 1L), collapse = " "), 1L, MAX_PREVIEW))
  }

  describe_error <- function(problem, calls) {
    name <- class(problem)[1]
    if (name == "simpleError") name <- "Error"
    value <- paste(conditionMessage(problem), collapse = "\n")
    call <- own_call(problem)
    within <- if (is.null(call)) "" else paste0(" in ", paste(deparse(call, nlines = 1L), collapse = " "))
    lines <- vapply(utils::head(rev(calls), MAX_CALLS), describe_call, "")
    c(name, value, paste(c(paste0(name, within, ": ", value), lines, ""), collapse = "\n"))
  }

  INTERRUPTED <- c("interrupted", "Interrupted", "the program was interrupted",
                   "Interrupted: the program was interrupted\n")

  # The calls of the program: those between `eval` below us and the handler.
  own_calls <- function(calls) {
    begin <- which(vapply(calls, function(call) identical(call[[1]], quote(withVisible)), NA))
    end <- length(calls) - 2L
    if (length(begin) && end >= begin[1] + 3L) calls[(begin[1] + 3L):end] else list()
  }

  run_code <- function(code) {
    calls <- list()
    note <- function(problem) calls <<- own_calls(sys.calls())
    cell <- function() {
      allowInterrupts(withCallingHandlers(evaluate(code), error = note, warning = warn))
      allowInterrupts(show_plots(all = TRUE))
      c("ok", "", "", "")
    }
    failed <- function(problem) {
      told <- tryCatch(describe_error(problem, calls), error = function(other) rep("an error that cannot be shown", 3))
      c("raised", told)
    }
    outcome <- withRestarts(
      tryCatch(cell(), error = failed, interrupt = function(signal) INTERRUPTED),
      abort = function() INTERRUPTED
    )
    if (outcome[1] != "ok") tryCatch(show_plots(all = TRUE), error = function(problem) NULL)
    outcome
  }

  named <- function(parts) {
    texts <- vapply(parts, as_text, "")
    at <- seq_along(texts) %% 2L == 1L
    as.list(stats::setNames(texts[!at], texts[at]))
  }

  set_variables <- function(values) if (length(values)) do.call(Sys.setenv, values)

  # Sets the cell's variables and directory; returns the function that takes them back.
  enter <- function(directory, values) {
    before <- Sys.getenv(names(values), unset = NA, names = TRUE)
    home <- if (nzchar(directory)) getwd()
    if (nzchar(directory)) setwd(directory)
    inside <- if (nzchar(directory)) getwd()
    set_variables(values)
    function() {
      if (length(values)) Sys.unsetenv(names(before)[is.na(before)])
      set_variables(as.list(before[!is.na(before)]))
      if (!is.null(home) && identical(getwd(), inside)) setwd(home)
    }
  }

  run <- function(code, directory, values) {
    count <<- count + 1L
    plots <<- NULL
    shown <<- 0L
    tryCatch(allowInterrupts(Sys.sleep(0)), interrupt = function(signal) NULL)  # one that came too late for the last cell
    send("begun")
    leave <- tryCatch(enter(directory, values), error = function(problem) problem)
    if (!is.function(leave)) return(send("ended", "raised", describe_error(leave, list())))
    outcome <- run_code(code)
    try(leave(), silent = TRUE)
    send(c("ended", outcome))
  }

  # ---- variables: no method of the program's is called, no promise and no active binding is looked at

  type_of <- function(value) {
    classes <- attr(value, "class", exact = TRUE)
    if (is.character(classes) && length(classes)) classes[1] else typeof(value)
  }

  size_text <- function(number) format(number, scientific = FALSE)

  preview_of <- function(value) {
    if (!is.atomic(value) || is.null(value)) return("")
    plain <- as.vector(unclass(value))
    few <- plain[seq_len(min(length(plain), 10L))]
    if (is.character(few)) few <- encodeString(substr(few, 1L, MAX_PREVIEW), quote = "\"")
    substr(paste(c(as.character(few), if (length(plain) > 10L) "..."), collapse = " "), 1L, MAX_PREVIEW)
  }

  describe_variable <- function(name) {
    if (bindingIsActive(as.name(name), globalenv())) return(c(name, "active binding", "", "", ""))
    value <- get(name, envir = globalenv(), inherits = FALSE)
    bare <- if (is.environment(value) || isS4(value) || is.function(value)) NULL else unclass(value)
    dimensions <- if (is.data.frame(value)) c(.row_names_info(value, 2L), length(bare)) else attr(value, "dim", exact = TRUE)
    known <- is.numeric(dimensions) && !anyNA(dimensions)
    c(name, type_of(value), if (is.null(bare)) "" else size_text(length(bare)),
      if (known) paste(vapply(dimensions, size_text, ""), collapse = ",") else "", preview_of(bare))
  }

  inspect <- function() {
    names <- ls(globalenv(), sorted = FALSE)
    told <- lapply(utils::head(names, MAX_VARIABLES), function(name) {
      tryCatch(describe_variable(name), error = function(problem) c(name, "unknown", "", "", ""))
    })
    send(c("inspected", length(names) - length(told), unlist(told)))
  }

  # ---- requests

  configure <- function(directory, values) {
    set_variables(values)
    if (nzchar(directory)) try(setwd(directory), silent = TRUE)
    send("configured")
  }

  answer <- function(request) {
    switch(as_text(request[[1]]),
      run = run(as_text(request[[2]]), as_text(request[[3]]), named(request[-(1:3)])),
      configure = configure(as_text(request[[2]]), named(request[-(1:2)])),
      inspect = inspect()
    )
  }

  serve <- function() suspendInterrupts(repeat answer(receive()))

  options(device = open_device, warn = 1, width = 100L, digits.secs = NULL)
}, envir = .kernel)
local({
  kernel <- .kernel
  rm(".kernel", envir = globalenv())
  kernel$serve()
})
