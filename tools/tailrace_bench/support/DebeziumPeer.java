// Debezium's asynchronous engine over a backlog, as `tailrace bench engine` measures it.
//
//     java -cp <jars> DebeziumPeer.java FORMAT ROWS FILE     FORMAT: json, connect, kafka, latency or print; FILE: properties
//
// The handler does what every handler must: it reads each record, marks it, and finishes the batch. With
// kafka it first sends the records, with the settings of prefix peer.producer., and waits for all of them.
// With print it writes each event as a line: topic, key and value in base64, or - if there is none; only
// records of the topic peer.last.topic are counted.
// With latency it measures the time from the commit to the handler for each record, and prints all in a line.
// Prints one JSON object: seconds from the start of the engine and from its first record to the last.

import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.Reader;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.Base64;
import java.util.Locale;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

public class DebeziumPeer {
    private static final long RECORDS_PER_S_MIN = 2_000;

    private static long wanted;
    private static long records;
    private static long characters;
    private static volatile long first;
    private static volatile long last;
    private static volatile Throwable failure;
    private static final CountDownLatch done = new CountDownLatch(1);

    public static void main(String[] arguments) throws Exception {
        wanted = Long.parseLong(arguments[1]);
        Properties properties = new Properties();
        try (Reader reader = Files.newBufferedReader(Path.of(arguments[2]))) {
            properties.load(reader);
        }
        long started = System.nanoTime();
        DebeziumEngine<?> engine = switch (arguments[0]) {
            case "json" -> json(properties);
            case "kafka" -> kafka(properties);
            case "print" -> print(properties);
            case "latency" -> latency(properties);
            default -> connect(properties);
        };
        ExecutorService executor = Executors.newSingleThreadExecutor();
        executor.execute(engine);
        boolean ended = done.await(120 + wanted / RECORDS_PER_S_MIN, TimeUnit.SECONDS);
        long cpu = ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
            .getProcessCpuTime();
        if (!ended || failure != null) {
            System.err.println("received " + records + " of " + wanted + " records");
            if (failure != null) {
                failure.printStackTrace();
            }
            Runtime.getRuntime().halt(1);
        }
        System.out.println(String.format(
            Locale.ROOT,
            "{\"rows\": %d, \"seconds\": %.6f, \"seconds_from_first\": %.6f, \"cpu_seconds\": %.3f, "
                + "\"characters\": %d}",
            records, (last - started) / 1e9, (last - first) / 1e9, cpu / 1e9, characters));
        System.out.flush();
        // The measurement is over; the caller drops the slot.
        Runtime.getRuntime().halt(0);
    }

    private static DebeziumEngine<?> json(Properties properties) throws Exception {
        return DebeziumEngine.create(Json.class)
            .using(properties)
            .using(DebeziumPeer::completed)
            .notifying((batch, committer) -> {
                begin();
                for (ChangeEvent<String, String> event : batch) {
                    if (event.value() != null) {
                        characters += event.value().length();
                        records++;
                    }
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                end();
            })
            .build();
    }

    private static DebeziumEngine<?> connect(Properties properties) throws Exception {
        return DebeziumEngine.create(Connect.class)
            .using(properties)
            .using(DebeziumPeer::completed)
            .notifying((batch, committer) -> {
                begin();
                for (ChangeEvent<SourceRecord, SourceRecord> event : batch) {
                    if (event.value().value() != null) {
                        records++;
                    }
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                end();
            })
            .build();
    }

    private static DebeziumEngine<?> latency(Properties properties) throws Exception {
        StringBuilder measured = new StringBuilder("[");
        return DebeziumEngine.create(Connect.class)
            .using(properties)
            .using(DebeziumPeer::completed)
            .notifying((batch, committer) -> {
                begin();
                Instant now = Instant.now();
                long seen = now.getEpochSecond() * 1_000_000 + now.getNano() / 1_000;
                for (ChangeEvent<SourceRecord, SourceRecord> event : batch) {
                    if (event.value().value() instanceof Struct value) {
                        long committed = value.getStruct("source").getInt64("ts_us");
                        measured.append(records++ == 0 ? "" : ",").append(seen - committed);
                    }
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                if (records >= wanted && last == 0) {
                    System.out.println(measured.append("]"));
                }
                end();
            })
            .build();
    }

    private static DebeziumEngine<?> print(Properties properties) throws Exception {
        String lastTopic = properties.getProperty("peer.last.topic");
        return DebeziumEngine.create(Json.class)
            .using(properties)
            .using(DebeziumPeer::completed)
            .notifying((batch, committer) -> {
                begin();
                for (ChangeEvent<String, String> event : batch) {
                    System.out.println(
                        encoded(event.destination()) + " " + encoded(event.key()) + " " + encoded(event.value()));
                    if (event.destination().equals(lastTopic)) {
                        records++;
                    }
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                end();
            })
            .build();
    }

    private static String encoded(String text) {
        return text == null ? "-" : Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
    }

    private static DebeziumEngine<?> kafka(Properties properties) throws Exception {
        Properties settings = new Properties();
        for (String name : properties.stringPropertyNames()) {
            if (name.startsWith("peer.producer.")) {
                settings.put(name.substring("peer.producer.".length()), properties.getProperty(name));
            }
        }
        KafkaProducer<String, String> producer =
            new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        AtomicReference<Exception> refused = new AtomicReference<>();
        return DebeziumEngine.create(Json.class)
            .using(properties)
            .using(DebeziumPeer::completed)
            .notifying((batch, committer) -> {
                begin();
                for (ChangeEvent<String, String> event : batch) {
                    producer.send(
                        new ProducerRecord<>(event.destination(), event.key(), event.value()),
                        (metadata, error) -> {
                            if (error != null) {
                                refused.compareAndSet(null, error);
                            }
                        });
                    if (event.value() != null) {
                        characters += event.value().length();
                        records++;
                    }
                }
                producer.flush();
                if (refused.get() != null) {
                    throw new IllegalStateException(refused.get());
                }
                for (ChangeEvent<String, String> event : batch) {
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                end();
            })
            .build();
    }

    private static void begin() {
        if (first == 0) {
            first = System.nanoTime();
        }
    }

    private static void end() {
        if (records >= wanted) {
            last = System.nanoTime();
            done.countDown();
        }
    }

    private static void completed(boolean success, String message, Throwable error) {
        if (records < wanted) {
            failure = error != null ? error : new IllegalStateException(message);
            done.countDown();
        }
    }
}
