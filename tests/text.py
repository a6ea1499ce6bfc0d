"""The text that the tiny tokenizers are trained on: plain English with the words that prompts like to use."""

TEXT = """\
When Mary and John went to the store, John gave a drink to Mary. When Tom and James went to the park, James gave the
ball to Tom. After Sarah and Anna had lunch at the school, Anna wanted to give the book to Sarah. Then Dan and Sid had
a long talk about the weather, and Sid said that the rain would stop before the evening.
The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. The capital of Germany is
Berlin. The Eiffel Tower is in the city of Paris, and the Colosseum is in the city of Rome.
The quick brown fox jumps over the lazy dog. The cat sat on the mat, and the dog sat on the log. One two three four five
six seven eight nine ten. 0 1 2 3 4 5 6 7 8 9 10 11 12 20 100. Monday, Tuesday, Wednesday, Thursday, Friday.
Once upon a time there was a small house at the edge of a deep forest. An old man lived there with his daughter, who was
as clever as she was kind. Every morning they walked to the river to see whether the boats had come back from the sea.
"Where are they now?" she asked. "They are where the wind has taken them," he answered, "and they will be home soon."
A model reads the words from left to right and guesses what comes next. Its layers write to a stream, its heads move
information from one position to another, and its last layer turns the stream into a guess about the next word.
The paper shows that attention heads copy tokens; that is why a repeated sequence is easy to predict the second time.
def add(first, second):
    return first + second
for name in names: print(name, len(name))
Hello world! Hello, how are you today? I am fine, thank you. What is your name? My name is Alice. This is a test of the
model, and this is another test of the same model. Good morning, good evening, good night. Yes, no, maybe, never, always.
He was born in the north and she was born in the south. They have been friends for many years, and they still write
letters to each other. The letters are short, but they say what has to be said.
"""
