import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.io.UncheckedIOException;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.SourceCodeAnalysis.CompletionInfo;
import jdk.jshell.UnresolvedReferenceException;
import jdk.jshell.VarSnippet;
import jdk.jshell.execution.LocalExecutionControlProvider;

/** The kernel of Java: evaluates cells with jshell, in this virtual machine. See evaluator.py for the messages. */
final class Kernel {
    private static final String REQUESTS = "/dev/fd/60";
    private static final String REPORTS = "/dev/fd/61";
    private static final int MAX_VARIABLES = 1000;
    private static final int MAX_PREVIEW = 200;
    private static final int STOP_AGAIN_MILLISECONDS = 20;
    private static final List<String> IMPORTS = List.of(
            "java.io", "java.math", "java.net", "java.nio.file", "java.util", "java.util.concurrent",
            "java.util.function", "java.util.regex", "java.util.stream");
    /** Types whose text is computed by no code of the program. */
    private static final Set<String> SHOWN_TYPES = Set.of(
            "boolean", "byte", "char", "short", "int", "long", "float", "double", "String",
            "Boolean", "Byte", "Character", "Short", "Integer", "Long", "Float", "Double");

    private final DataOutputStream reports;
    private final BlockingQueue<List<byte[]>> requests = new LinkedBlockingQueue<>();
    private final JShell shell;
    private final Map<String, Place> places = new HashMap<>();
    private volatile boolean running;
    private volatile boolean interrupted;
    private int count;

    /** Where a snippet begins: the cell, and the lines before it there. */
    private record Place(int cell, int lines) {}

    /** The end of a cell. */
    private record Outcome(String name, String title, String value, String traceback) {
        static final Outcome OK = new Outcome("ok", "", "", "");
        static final Outcome INTERRUPTED = new Outcome("interrupted", "Interrupted",
                "the program was interrupted", "Interrupted: the program was interrupted\n");

        static Outcome raised(String title, String value, String traceback) {
            return new Outcome("raised", title, value, traceback);
        }
    }

    public static void main(String[] arguments) throws IOException {
        System.setOut(unbuffered(FileDescriptor.out));
        System.setErr(unbuffered(FileDescriptor.err));
        new Kernel().serve();
    }

    private static PrintStream unbuffered(FileDescriptor descriptor) {
        return new PrintStream(new FileOutputStream(descriptor), true, StandardCharsets.UTF_8);
    }

    private Kernel() throws IOException {
        DataInputStream incoming = new DataInputStream(new BufferedInputStream(new FileInputStream(REQUESTS)));
        reports = new DataOutputStream(new BufferedOutputStream(new FileOutputStream(REPORTS)));
        Thread reader = new Thread(() -> read(incoming), "cloche-requests");
        reader.setDaemon(true);
        reader.start();
        System.getenv().forEach(Kernel::setProperty);
        shell = JShell.builder().executionEngine(new LocalExecutionControlProvider(), Map.of())
                .out(System.out).err(System.err).build();
        IMPORTS.forEach(name -> shell.eval("import " + name + ".*;"));
    }

    // ---- messages

    private void read(DataInputStream incoming) {
        try {
            while (true) {
                List<byte[]> request = new ArrayList<>();
                for (int left = incoming.readInt(); left > 0; left--) {
                    request.add(incoming.readNBytes(incoming.readInt()));
                }
                if (text(request.get(0)).equals("interrupt")) interrupt();
                else requests.add(request);
            }
        } catch (IOException ended) {
            Runtime.getRuntime().halt(1); // the kernel's other half is gone
        }
    }

    private void send(List<?> parts) {
        try {
            reports.writeInt(parts.size());
            for (Object part : parts) {
                byte[] bytes = String.valueOf(part).getBytes(StandardCharsets.UTF_8);
                reports.writeInt(bytes.length);
                reports.write(bytes);
            }
            reports.flush();
        } catch (IOException problem) {
            throw new UncheckedIOException(problem);
        }
    }

    private static String text(byte[] part) {
        return new String(part, StandardCharsets.UTF_8);
    }

    private void serve() {
        while (true) {
            List<byte[]> request = take();
            switch (text(request.get(0))) {
                case "run" -> run(text(request.get(1)), text(request.get(2)), named(request, 3));
                case "configure" -> configure(text(request.get(1)), named(request, 2));
                case "inspect" -> inspect();
                default -> { }
            }
        }
    }

    private List<byte[]> take() {
        while (true) {
            try {
                return requests.take();
            } catch (InterruptedException byTheProgram) {
                continue;
            }
        }
    }

    private static Map<String, String> named(List<byte[]> parts, int from) {
        Map<String, String> values = new LinkedHashMap<>();
        for (int at = from; at + 1 < parts.size(); at += 2) values.put(text(parts.get(at)), text(parts.get(at + 1)));
        return values;
    }

    // ---- cells

    private void run(String code, String directory, Map<String, String> values) {
        count += 1;
        interrupted = false;
        running = true;
        send(List.of("begun"));
        Outcome outcome;
        if (!directory.isEmpty() && !new File(directory).isDirectory()) {
            String value = "cannot work in " + directory;
            outcome = Outcome.raised("NoSuchFileException", value, "NoSuchFileException: " + value + "\n");
        } else {
            Map<String, String> before = enter(directory, values);
            outcome = evaluate(code);
            leave(before, values);
        }
        running = false;
        System.out.flush();
        System.err.flush();
        send(List.of("ended", outcome.name, outcome.title, outcome.value, outcome.traceback));
    }

    private Outcome evaluate(String code) {
        SourceCodeAnalysis analysis = shell.sourceCodeAnalysis();
        String rest = code;
        while (!rest.isBlank()) {
            if (interrupted) return Outcome.INTERRUPTED;
            CompletionInfo info = analysis.analyzeCompletion(rest);
            String source = info.source() == null ? rest : info.source();
            String after = info.source() == null ? "" : info.remaining();
            int begin = code.length() - rest.length() + leadingSpace(rest);
            Outcome outcome = evaluateSnippet(source.stripLeading(), lineOf(code, begin), after.isBlank());
            if (outcome != Outcome.OK) return outcome;
            rest = after;
        }
        return interrupted ? Outcome.INTERRUPTED : Outcome.OK;
    }

    private static int leadingSpace(String text) {
        return text.length() - text.stripLeading().length();
    }

    private static int lineOf(String code, int at) {
        return (int) code.substring(0, Math.min(at, code.length())).chars().filter(each -> each == '\n').count();
    }

    private Outcome evaluateSnippet(String source, int lines, boolean last) {
        Place place = new Place(count, lines);
        for (SnippetEvent event : shell.eval(source)) {
            Snippet snippet = event.snippet();
            if (event.causeSnippet() != null) continue; // what the snippet has changed in earlier ones
            places.put(snippet.id(), place);
            if (interrupted) return Outcome.INTERRUPTED;
            if (event.status() == Snippet.Status.REJECTED) return describeRejected(snippet, place);
            if (event.exception() != null) return describeException(event.exception());
            if (last && isShown(event)) show(event.value());
        }
        return Outcome.OK;
    }

    private static boolean isShown(SnippetEvent event) {
        Snippet.SubKind kind = event.snippet().subKind();
        boolean expression = event.snippet().kind() == Snippet.Kind.EXPRESSION
                || kind == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
        return expression && kind != Snippet.SubKind.ASSIGNMENT_SUBKIND
                && event.value() != null && !event.value().isEmpty();
    }

    private void show(String value) {
        send(List.of("display", "main", "text/plain", value));
        take();
    }

    private Outcome describeRejected(Snippet snippet, Place place) {
        StringBuilder told = new StringBuilder();
        String first = "the code does not compile";
        boolean any = false;
        for (Diag each : (Iterable<Diag>) shell.diagnostics(snippet)::iterator) {
            if (!each.isError()) continue;
            String message = each.getMessage(Locale.ROOT);
            int at = (int) Math.max(each.getPosition(), 0);
            int line = place.lines + lineOf(snippet.source(), at) + 1;
            told.append("[cell ").append(place.cell).append("]:").append(line).append(": ").append(message).append('\n');
            if (!any) first = message;
            any = true;
        }
        return Outcome.raised("CompilationError", first, told.isEmpty() ? first + "\n" : told.toString());
    }

    private Outcome describeException(JShellException exception) {
        if (exception instanceof UnresolvedReferenceException unresolved) {
            String value = "something that " + unresolved.getSnippet().name() + " needs is not declared";
            return Outcome.raised("UnresolvedReferenceException", value,
                    "UnresolvedReferenceException: " + value + "\n" + frames(unresolved));
        }
        String name = exception instanceof EvalException raised ? raised.getExceptionClassName()
                : exception.getClass().getName();
        String value = exception.getMessage() == null ? "" : exception.getMessage();
        StringBuilder told = new StringBuilder(headline(name, value)).append(frames(exception));
        Throwable cause = exception.getCause();
        for (int left = 16; cause != null && left > 0; left--, cause = cause.getCause()) {
            String its = cause instanceof EvalException raised ? raised.getExceptionClassName()
                    : cause.getClass().getName();
            String message = cause.getMessage() == null ? "" : cause.getMessage();
            told.append("Caused by: ").append(headline(its, message)).append(frames(cause));
        }
        return Outcome.raised(name.substring(name.lastIndexOf('.') + 1), value, told.toString());
    }

    private static String headline(String name, String value) {
        return value.isEmpty() ? name + "\n" : name + ": " + value + "\n";
    }

    /** The frames down to the cell; jshell names snippets by `#` and their id. */
    private String frames(Throwable failed) {
        StringBuilder told = new StringBuilder();
        for (StackTraceElement frame : failed.getStackTrace()) {
            String file = frame.getFileName();
            Place place = file != null && file.startsWith("#") ? places.get(file.substring(1)) : null;
            if (place == null) {
                told.append("    at ").append(frame).append('\n');
                continue;
            }
            String method = frame.getMethodName() == null || frame.getMethodName().isEmpty() ? "" : " in " + frame.getMethodName();
            told.append("    at [cell ").append(place.cell).append("]:").append(place.lines + frame.getLineNumber())
                    .append(method).append('\n');
        }
        return told.toString();
    }

    /** Stops the running cell: again and again, since code that is being compiled cannot be stopped. */
    private void interrupt() {
        if (!running) return;
        interrupted = true;
        Thread stopper = new Thread(() -> {
            try {
                while (running && interrupted) {
                    shell.stop();
                    Thread.sleep(STOP_AGAIN_MILLISECONDS);
                }
            } catch (InterruptedException byTheProgram) {
                shell.stop();
            }
        }, "cloche-interrupt");
        stopper.setDaemon(true);
        stopper.start();
    }

    // ---- environment: system properties, and the environment that `System.getenv` and new processes have

    private static void setProperty(String name, String value) {
        if (!name.isEmpty()) System.setProperty(name, value);
    }

    private Map<String, String> enter(String directory, Map<String, String> values) {
        Map<String, String> before = new HashMap<>();
        for (String name : values.keySet()) before.put(name, System.getenv(name));
        if (!directory.isEmpty()) {
            before.put("user.dir", System.getProperty("user.dir"));
            System.setProperty("user.dir", new File(directory).getAbsolutePath());
        }
        values.forEach(Kernel::setVariable);
        return before;
    }

    private static void leave(Map<String, String> before, Map<String, String> values) {
        before.forEach((name, value) -> {
            if (values.containsKey(name)) setVariable(name, value);
            else System.setProperty(name, value);
        });
    }

    private static void setVariable(String name, String value) {
        if (name.isEmpty()) return;
        Map<String, String> environment = environment();
        if (value == null) {
            System.clearProperty(name);
            environment.remove(name);
        } else {
            System.setProperty(name, value);
            environment.put(name, value);
        }
    }

    @SuppressWarnings("unchecked")
    private static Map<String, String> environment() {
        try {
            Map<String, String> view = System.getenv();
            Field inner = view.getClass().getDeclaredField("m");
            inner.setAccessible(true);
            return (Map<String, String>) inner.get(view);
        } catch (ReflectiveOperationException | RuntimeException otherJdk) {
            return new HashMap<>();
        }
    }

    private void configure(String directory, Map<String, String> values) {
        values.forEach(Kernel::setVariable);
        if (!directory.isEmpty()) System.setProperty("user.dir", directory);
        send(List.of("configured"));
    }

    // ---- variables

    private void inspect() {
        List<String> told = new ArrayList<>();
        List<VarSnippet> known = shell.variables().filter(each -> !each.name().startsWith("$")).toList();
        for (VarSnippet each : known.subList(0, Math.min(known.size(), MAX_VARIABLES))) {
            boolean shown = SHOWN_TYPES.contains(each.typeName())
                    && shell.status(each) == Snippet.Status.VALID;
            told.addAll(List.of(each.name(), each.typeName(), "", "", shown ? preview(shell.varValue(each)) : ""));
        }
        List<String> parts = new ArrayList<>(List.of("inspected", String.valueOf(known.size() - told.size() / 5)));
        parts.addAll(told);
        send(parts);
    }

    private static String preview(String value) {
        return value.length() <= MAX_PREVIEW ? value : value.substring(0, MAX_PREVIEW - 1) + "…";
    }
}
