// The AI SDK and LangChain.js, unmodified: node frameworks.mjs URL
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { HumanMessage } from '@langchain/core/messages';
import { tool as langchainTool } from '@langchain/core/tools';
import { ChatOpenAI } from '@langchain/openai';
import { generateObject, generateText, streamText, tool } from 'ai';
import assert from 'node:assert';
import { z } from 'zod';

const baseURL = process.argv[2] + '/v1';
const name = (await (await fetch(baseURL + '/models')).json()).data[0].id;
const City = z.object({ name: z.string(), people: z.number().int() });
const input = z.object({ city: z.string() });
const description = 'The weather in a city.';
let failed = false;

async function test(title, body) {
    try {
        await body();
        console.log(`ok     ${title}`);
    } catch (error) {
        failed = true;
        console.log(`FAILED ${title}: ${error.name}: ${error.message} ${error.responseBody ?? ''}`);
    }
}

const openai = createOpenAI({ baseURL, apiKey: 'none' });
const options = { name: 'server', baseURL, supportsStructuredOutputs: true };
for (const [title, model] of [
    ['compatible', createOpenAICompatible(options)(name)],
    ['chat', openai.chat(name)],
    ['responses', openai.responses(name)],
]) {
    const common = { model, maxOutputTokens: 300, maxRetries: 0, temperature: 0 };
    await test(`ai_sdk_text ${title}`, async () => {
        const made = await generateText({ ...common, maxOutputTokens: 20, prompt: 'Say hello.' });
        assert(made.text);
    });
    await test(`ai_sdk_stream ${title}`, async () => {
        const made = streamText({ ...common, maxOutputTokens: 20, prompt: 'Say hello.' });
        let text = '';
        for await (const piece of made.textStream) text += piece;
        assert(text);
    });
    await test(`ai_sdk_object ${title}`, async () => {
        City.parse((await generateObject({ ...common, schema: City, prompt: 'Paris' })).object);
    });
    await test(`ai_sdk_tools ${title}`, async () => {
        const weather = tool({ description, inputSchema: input });
        const prompt = 'What is the weather in Paris?';
        const made = await generateText({ ...common, prompt, tools: { weather }, toolChoice: 'required' });
        input.parse(made.toolCalls[0].input);
    });
}

const chat = new ChatOpenAI({
    model: name, apiKey: 'none', configuration: { baseURL }, maxTokens: 100, temperature: 0, maxRetries: 0,
});
await test('langchain_js', async () => {
    assert((await chat.invoke('Say hello.')).content);
    let pieces = 0;
    for await (const _ of await chat.stream('Say hello.')) pieces += 1;
    assert(pieces > 1);
    const typed = chat.withStructuredOutput(City, { name: 'City', method: 'jsonSchema' });
    City.parse(await typed.invoke('Paris'));
    const run = async ({ city }) => `sunny in ${city}`;
    const weather = langchainTool(run, { name: 'weather', description, schema: input });
    const question = new HumanMessage('What is the weather in Paris?');
    const asked = await chat.bindTools([weather], { tool_choice: 'weather' }).invoke([question]);
    const result = await weather.invoke(asked.tool_calls[0]);
    assert((await chat.bindTools([weather]).invoke([question, asked, result])).content);
});
process.exit(failed ? 1 : 0);
